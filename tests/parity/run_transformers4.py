"""Run by test_transformers4.py in a process whose transformers is version 4; not a test itself.

Usage: python run_transformers4.py CASES.pt RESULTS.pt. CASES is a list of (case, state dict, tensors); RESULTS becomes
a list of what `evaluate` returns, or of error messages.
"""

import sys

import torch
import transformers

from bert_fast.testing.parity import evaluate


def main(cases_path: str, results_path: str) -> None:
    results: list[dict[str, torch.Tensor] | str] = []
    for case, state, tensors in torch.load(cases_path, weights_only=False):
        try:
            config = transformers.BertConfig(**case.full_config(), attn_implementation="eager")
            model = getattr(transformers, case.model)(config)
            model.load_state_dict(state)
            results.append(evaluate(model.to(next(iter(state.values())).dtype).eval(), case, tensors))
        except Exception as error:  # one broken case must not hide the others; the test shows the message
            results.append(f"{type(error).__name__}: {error}")
    torch.save({"version": transformers.__version__, "results": results}, results_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
