"""``infssm schema``."""

from __future__ import annotations

import json

import typer


def command() -> None:
    """Print the JSON schema of a configuration file, for editors that check and complete YAML.

    Example: `infssm schema > infssm.schema.json`, and in the first line of a file
    `# yaml-language-server: $schema=infssm.schema.json`
    """
    from infssm.learner.config.fields import RunConfig
    from infssm.methods import list_methods
    from infssm.models import list_models

    schema = RunConfig.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    for section, names in (("ModelConfig", list_models()), ("MethodConfig", list_methods())):
        schema["$defs"][section]["properties"]["name"]["examples"] = names
    for name in ("DataConfig", "ModelConfig", "MethodConfig"):  # `method: ewc` is `method: {name: ewc}`
        schema["$defs"][name] = {"anyOf": [{"type": "string"}, schema["$defs"][name]]}
    typer.echo(json.dumps(schema, indent=2, ensure_ascii=False))
