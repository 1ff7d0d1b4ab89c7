"""The arguments that every model shares, said once: in `BertModel.forward`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bert_fast.models.argument_checks import check_flags
from bert_fast.models.bert import BertModel

Inputs = dict[str, Any]  # the keyword arguments of `BertModel.encode`


def takes_model_arguments(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `forward(self, inputs, *, labels, ...)` of a head one that takes the arguments of `BertModel.forward` too.

    The head gets those of the model as one dictionary for `encode`, without a cache unless it names use_cache itself,
    and returns an output class; return_dict is obeyed here. Signature and documentation are those of the result, so
    that tools which ask for the names of arguments (Trainer does) find all of them.
    """
    shared, signature = dict(inspect.signature(BertModel.forward).parameters), inspect.signature(forward)
    own = dict(list(signature.parameters.items())[2:])  # all but self and inputs

    @functools.wraps(forward)
    def wrapper(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        arguments = {name: others.pop(name) for name in own if name in others}
        if unknown := [name for name in others if name not in shared]:
            raise TypeError(f"{type(self).__name__}.forward() got an unexpected keyword argument {unknown[0]!r}")
        check_flags(return_dict=return_dict, output_logits=arguments.get("output_logits"))
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids,
            "position_ids": position_ids, "head_mask": head_mask, "inputs_embeds": inputs_embeds, "use_cache": False,
            **others,
        }  # fmt: skip
        return self.finish(forward(self, inputs, **arguments), return_dict)

    parameters = list((shared | own).values())
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapper
