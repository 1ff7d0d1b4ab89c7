"""A column of texts to a column of token ids, in Parquet: no Python object for a text or a token."""

import time

import material
import pyarrow
import pyarrow.parquet

import bert_fast

options = material.arguments(__doc__, steps=20)  # steps: how many copies of the text there are
options.output.mkdir(parents=True, exist_ok=True)
texts = pyarrow.array(material.texts() * options.steps)
tokenizer = bert_fast.BertTokenizer.from_pretrained(material.model_folder())

began = time.perf_counter()
batch = tokenizer.encode_ragged(texts, max_length=512)  # reads the column where it lies
seconds = time.perf_counter() - began
ids = pyarrow.ListArray.from_arrays(batch.cu_seqlens.astype("int32"), batch.ids)  # over the tokenizer's memory
path = options.output / "tokens.parquet"
pyarrow.parquet.write_table(pyarrow.table({"text": texts, "input_ids": ids}), path)
print(f"{len(texts):,} texts, {len(batch.ids):,} tokens, {texts.nbytes / 1e6 / seconds:,.0f} MB/s")

table = pyarrow.parquet.read_table(path)
print(f"{path}: {table.num_rows:,} rows; the first: {table['input_ids'][0].as_py()[:8]} ...")
