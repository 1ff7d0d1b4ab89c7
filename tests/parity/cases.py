"""The calls that are compared with transformers: what both versions know, and what version 5 removed."""

from bert_fast.testing.parity import Case

EVERYTHING = {"output_attentions": True, "output_hidden_states": True}
KEY, KEY_QUERY = {"position_embedding_type": "relative_key"}, {"position_embedding_type": "relative_key_query"}
DECODER = {"is_decoder": True}
CROSS = {"is_decoder": True, "add_cross_attention": True}
MEMORY = ("encoder_hidden_states", "encoder_attention_mask")
REGRESSION = {"num_labels": 1}
SEVERAL = {"num_labels": 4, "problem_type": "multi_label_classification"}

TRANSFORMERS_5 = [
    *(Case(f"mask {mask}", mask=mask, flags=EVERYTHING) for mask in ("none", "full", "right", "left", "holes", "4d")),
    Case("mask 3d", mask="3d", flags=EVERYTHING),
    Case("one token", length=1, mask="none"),
    Case("one head", config={"hidden_size": 32, "num_attention_heads": 1}, length=40, batch_size=2),
    Case("five heads", config={"hidden_size": 40, "num_attention_heads": 5}, length=7),
    Case("wide heads", config={"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3}, length=17),
    Case("types and positions", inputs=("token_type_ids", "position_ids")),
    Case("vectors for words", inputs=("inputs_embeds", "token_type_ids"), mask="left"),
    Case("no padding id", config={"pad_token_id": None}, mask="none"),
    *(
        Case(f"act {act}", model="BertForMaskedLM", config={"hidden_act": act}, labels=("words",))
        for act in ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh")
    ),
    Case("masked lm", model="BertForMaskedLM", labels=("words",), flags=EVERYTHING),
    Case("masked lm, no labels", model="BertForMaskedLM", mask="left"),
    Case("masked lm, untied", model="BertForMaskedLM", config={"tie_word_embeddings": False}, labels=("words",)),
    Case("pre-training", model="BertForPreTraining", labels=("words", "next_sentence_label")),
    Case("pre-training, no labels", model="BertForPreTraining"),
    Case("next sentence", model="BertForNextSentencePrediction", labels=("class",)),
    Case("sequence classes", model="BertForSequenceClassification", config={"num_labels": 5}, labels=("class",)),
    Case("sequence number", model="BertForSequenceClassification", config=REGRESSION, labels=("number",)),
    Case("sequence multi-label", model="BertForSequenceClassification", config=SEVERAL, labels=("classes",)),
    Case("multiple choice", model="BertForMultipleChoice", inputs=("token_type_ids",), labels=("class",)),
    Case("token classes", model="BertForTokenClassification", config={"num_labels": 4}, labels=("tokens",)),
    Case("question answering", model="BertForQuestionAnswering", mask="none",
         labels=("start_positions", "end_positions")),
    Case("question answering, no labels", model="BertForQuestionAnswering"),
    Case("decoder", config=DECODER, flags=EVERYTHING),
    Case("decoder, left", config=DECODER, mask="left"),
    Case("decoder, cache", config=DECODER, first_step=4),
    Case("decoder, cache, one step, left", config=DECODER, first_step=10, mask="left"),
    Case("decoder, cache, no mask", config=DECODER, first_step=6, mask="none", inputs=("inputs_embeds",)),
    Case("cross-attention", config=CROSS, inputs=MEMORY, flags=EVERYTHING),
    Case("cross-attention, no mask", config=CROSS, inputs=("encoder_hidden_states",), memory_length=3),
    Case("cross-attention, cache", config=CROSS, inputs=MEMORY, first_step=5),
    Case("language model", model="BertLMHeadModel", config=DECODER, labels=("words",)),
    Case("language model, memory", model="BertLMHeadModel", config=CROSS, inputs=MEMORY, labels=("words",)),
    Case("language model, no labels, cache", model="BertLMHeadModel", config=DECODER, first_step=9),
]  # fmt: skip

TRANSFORMERS_4 = [
    Case("plain", flags=EVERYTHING),
    Case("mask 3d", mask="3d", flags=EVERYTHING),
    Case("mask 3d, decoder", mask="3d", config=DECODER),
    Case("head mask", inputs=("head_mask",), flags=EVERYTHING),
    Case("head mask of every layer", inputs=("layer_head_mask",), flags=EVERYTHING, mask="left"),
    Case("head mask, memory", config=CROSS, inputs=("head_mask", *MEMORY), flags=EVERYTHING),
    Case("head mask, masked lm", model="BertForMaskedLM", inputs=("head_mask",), labels=("words",)),
    *(Case(f"relative_key, {mask}", config=KEY, mask=mask, flags=EVERYTHING) for mask in ("right", "left", "holes")),
    *(Case(f"relative_key_query, {mask}", config=KEY_QUERY, mask=mask) for mask in ("none", "right", "left", "holes")),
    Case("relative_key_query, head mask", config=KEY_QUERY, inputs=("layer_head_mask",), flags=EVERYTHING),
    Case("relative_key_query, mask 3d", config=KEY_QUERY, mask="3d"),
    Case("relative_key, longest", config={**KEY, "max_position_embeddings": 11}, length=11),
    Case("relative_key, decoder", config={**KEY, **DECODER}, flags={"use_cache": False}),
    Case("relative_key_query, memory", config={**KEY_QUERY, **CROSS}, inputs=MEMORY, flags={"use_cache": False}),
    Case("relative_key, classes", model="BertForSequenceClassification", config=KEY, labels=("class",)),
    Case("relative_key_query, masked lm", model="BertForMaskedLM", config=KEY_QUERY, labels=("words",)),
    Case("legacy cache", config=DECODER, first_step=4, flags={"legacy_cache": True}),
    Case("legacy cache, one step, left", config=DECODER, first_step=10, mask="left", flags={"legacy_cache": True}),
    Case("legacy cache, memory", config=CROSS, inputs=MEMORY, first_step=5, flags={"legacy_cache": True}),
    Case("untied", model="BertForMaskedLM", config={"tie_word_embeddings": False}, labels=("words",)),
    Case("language model", model="BertLMHeadModel", config=DECODER, labels=("words",)),
]  # fmt: skip
