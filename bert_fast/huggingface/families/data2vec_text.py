"""Data2VecText (Baevski et al. 2022, arXiv:2202.03555): RoBERTa under another name."""

from dataclasses import replace

from bert_fast.huggingface.families.roberta import ROBERTA

DATA2VEC_TEXT = replace(
    ROBERTA,
    libraries={"transformers.models.data2vec.modeling_data2vec_text": "Data2VecText"},
    inner="data2vec_text",
    containers=ROBERTA.containers - {"roberta"} | {"data2vec_text"},
)
