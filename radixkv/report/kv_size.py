"""How much memory a model's K/V take, from its configuration alone."""

from __future__ import annotations

from pathlib import Path

import msgspec


class KVSize(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that K and V of one token take over all layers, in the type the model was saved in."""

    model: str
    dtype: str
    bytes_per_token: int


def kv_size(model: str) -> KVSize:
    """Read a model's configuration, no weights and no torch.

    ``model`` is whatever ``radixkv serve --model`` takes.  Of a hub id only the configuration is fetched; an alias is one file,
    and is fetched whole if it isn't here.

    Raises
    ------
    ValueError
        There is no such model, or it is of an architecture that isn't supported.
    OSError
        It can't be fetched; the text says what to do.
    """
    from radixkv.model.loader import load_model_config, resolve_model

    source = resolve_model(str(_config_from_hub(model)) if _is_hub_id(model) else model)
    config = load_model_config(source)
    return KVSize(model=model, dtype=config.dtype, bytes_per_token=config.kv_bytes_per_token(config.dtype))


def _is_hub_id(model: str) -> bool:
    there = Path(model).expanduser().exists()
    return not there and model.count("/") == 1 and not model.startswith((".", "/", "~")) and not model.endswith(".gguf")


def _config_from_hub(repo_id: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo_id, "config.json")).parent
    except Exception as error:  # as for whole models: the hub client lets many kinds through
        raise OSError(
            f"couldn't fetch the configuration of {repo_id} from the Hugging Face hub: {error}\n"
            "Check the name, log in with `hf auth login` if it is gated, or name a model folder or .gguf file that is here."
        ) from error
