"""Hints for options that users of other tools type."""

_SEVERAL = "separate the values of a setting by commas: optimizer.lr=1e-3,3e-3"
_RECIPE = "the recipe is the first word: runner run FILE"
_SHOWN = "runner show RECIPE prints the complete recipe"
_CHECKED = "runner validate RECIPE checks a recipe"
_OPTIONS = {
    "-m": _SEVERAL,
    "--multirun": _SEVERAL,
    "--sweep": _SEVERAL,
    "-c": _RECIPE,
    "-cn": _RECIPE,
    "--config": _RECIPE,
    "--config-dir": _RECIPE,
    "--config-name": _RECIPE,
    "--config-path": _RECIPE,
    "--cfg": _SHOWN,
    "--print-config": _SHOWN,
    "--print_config": _SHOWN,
    "--resolve": _SHOWN,
    "--dry-run": _CHECKED,
    "--fast-dev-run": "--smoke trains a few updates",
}
_SETTINGS = {
    "--batch-size": "train.batch_size=VALUE",
    "--batch_size": "train.batch_size=VALUE",
    "--device": "device=VALUE",
    "--epochs": "train.epochs=VALUE",
    "--learning-rate": "optimizer.lr=VALUE",
    "--learning_rate": "optimizer.lr=VALUE",
    "--lr": "optimizer.lr=VALUE",
    "--max-epochs": "train.epochs=VALUE",
    "--max_epochs": "train.epochs=VALUE",
    "--max-steps": "train.updates=VALUE",
    "--max_steps": "train.updates=VALUE",
    "--seed": "seed=VALUE",
}


def option_hint(option: str) -> str:
    """Returns what to write instead of an option that does not exist; empty without advice."""
    if option in _OPTIONS:
        return _OPTIONS[option]
    setting = _SETTINGS.get(option)
    if setting is None and "." in option:
        setting = f"{option.lstrip('-')}=VALUE"
    return f"settings have no dashes: {setting}" if setting else ""
