"""Trainers of other libraries, of models that the backend compiles: the losses of eager, and runs that go on where they were saved."""

import re
from pathlib import Path

import lightning
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from families import made
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader

import tandem
from tandem.recipe import DelayedScaling


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def test_trl(tmp_path):
    """`SFTTrainer`."""
    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(64)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    losses = []
    for is_compiled in (False, True):
        model, inputs = made("Llama")
        if is_compiled:
            model.compile(backend="tandem")
        rows = Dataset.from_dict({"input_ids": inputs["input_ids"].tolist() * 4})
        arguments = trl.SFTConfig(str(tmp_path), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True, bf16=False, logging_steps=1, seed=0, disable_tqdm=True)
        trainer = trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert "SwiGLU" in tandem.explain(model)


def trained(folder, resume=None, callbacks=()):
    torch._dynamo.reset()
    model, inputs = made("Llama")
    model.compile(backend="tandem", options={"recipe": DelayedScaling(amax_history_len=4)})
    rows = Dataset.from_dict({"input_ids": inputs["input_ids"].tolist() * 8, "labels": inputs["input_ids"].tolist() * 8}).with_format("torch")
    arguments = transformers.TrainingArguments(str(folder), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], save_steps=2, use_cpu=True, logging_steps=1, seed=0, disable_tqdm=True)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[*callbacks])
    trainer.train(resume_from_checkpoint=resume)
    return [each["loss"] for each in trainer.state.log_history if "loss" in each], tandem.recipe_state_dict(model)


@pytest.mark.filterwarnings("ignore")
def test_the_callback_of_the_page_goes_on_with_the_state_of_a_recipe(tmp_path):
    (code,) = re.findall(r"^```py\n(.*?)^```", (Path(__file__).parents[2] / "docs" / "any-model.md").read_text(), re.M | re.S)
    page = {}
    exec(code, page)
    losses, state = trained(tmp_path, callbacks=[page["RecipeState"]()])
    again, state_again = trained(tmp_path, tmp_path / "checkpoint-2", [page["RecipeState"]()])
    assert again == losses
    assert all(torch.equal(state_again[name], each) for name, each in state.items())
    _, without = trained(tmp_path, tmp_path / "checkpoint-2")
    assert any(not torch.equal(without[name], each) for name, each in state.items())


def test_a_list_of_backends_that_is_closed(tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), torch_compile_backend="tandem", report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="'TANDEM' is not a valid DynamoBackend"):
        transformers.Trainer(torch.nn.Linear(2, 2), arguments)


class Lit(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, batch, at):
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs, batch, at):
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["recipe_state"] = tandem.recipe_state_dict(self)

    def on_load_checkpoint(self, checkpoint):
        tandem.load_recipe_state_dict(self, checkpoint["recipe_state"])


def fit(folder, wrap, steps=4, path=None):
    model, inputs = made("Llama")
    module = Lit(model)
    trainer = lightning.Trainer(accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder)
    rows = [{name: each[at] for name, each in inputs.items()} for at in range(2)] * 8
    trainer.fit(wrap(module), DataLoader(rows, batch_size=2), ckpt_path=path)
    return module, trainer


def in_place(**options):
    return lambda module: (module.model.compile(backend="tandem", options=options), module)[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", [in_place(), tandem.compile], ids=["model compiled in place", "module compiled"])
def test_lightning(tmp_path, wrap):
    expected, _ = fit(tmp_path, lambda module: module)
    own, _ = fit(tmp_path, wrap)
    assert own.losses == pytest.approx(expected.losses, rel=1e-4)
    assert own.losses[-1] < own.losses[0]
    assert "SwiGLU" in tandem.explain(own)


@pytest.mark.filterwarnings("ignore")
def test_lightning_goes_on_with_the_state_of_a_recipe(tmp_path):
    wrap = in_place(recipe=DelayedScaling(amax_history_len=4))
    whole, _ = fit(tmp_path, wrap)
    _, trainer = fit(tmp_path, wrap, steps=2)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    rest, _ = fit(tmp_path, wrap, path=tmp_path / "saved.ckpt")
    assert rest.losses == whole.losses[2:]
