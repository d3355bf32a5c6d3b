"""Token classifiers for families that transformers has none for: its generic one, over the family's own backbone.

A factory like transformers' `AutoModelForTokenClassification`, which is asked first. What is made here is saved as any
other model; to open it needs this class, until transformers has one by the same name.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification


class TokenClassifiers:
    """Makes the token classifier of any config that transformers has a backbone for."""

    @staticmethod
    def from_config(config: PreTrainedConfig, *, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
        """Return a model, as the factories of transformers do.

        Raises:
            ValueError: transformers knows no model of this config.
        """
        has_own_code = "AutoModelForTokenClassification" in (getattr(config, "auto_map", None) or {})
        is_known = type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
        if has_own_code or is_known or type(config) not in MODEL_MAPPING:
            return AutoModelForTokenClassification.from_config(config, trust_remote_code=trust_remote_code, **options)
        return _classifier_on(MODEL_MAPPING[type(config)])._from_config(config, **options)


@functools.cache
def _classifier_on(backbone: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class, made as transformers makes its own: of the generic one and what the family has in common."""
    family = next(base for base in backbone.__mro__[1:] if issubclass(base, PreTrainedModel))
    name = f"{backbone.__name__.removesuffix('Model')}ForTokenClassification"
    return type(name, (GenericForTokenClassification, family), {"config_class": backbone.config_class})
