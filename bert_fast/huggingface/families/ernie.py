"""ERNIE (Sun et al. 2019, arXiv:1904.09223; 2021, arXiv:2107.02137): BERT, with a table of task types if asked for.

Calls that give task types run transformers' code; without any, all tokens are of type 0.
"""

from dataclasses import replace

from bert_fast.huggingface import containers, word_heads
from bert_fast.huggingface.families.bert import BERT

ERNIE = replace(
    BERT,
    libraries={"transformers.models.ernie.modeling_ernie": "Ernie"},
    inner="ernie",
    models={
        **{name: computing for name, computing in BERT.models.items() if name != "*LMHeadModel"},
        "*ForCausalLM": word_heads.FusedForCausalLM,
    },
    parts={**BERT.parts, "*Embeddings": containers.FusedEmbeddingsOfTasks},
    names={"*Embeddings": {"task_table": "task_type_embeddings?"}},
    containers=BERT.containers - {"bert"} | {"ernie"},
)
