"""The knobs of models beside the policy, which are never trained."""

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from configs.inference import SERVER, Servers
from configs.knobs import URI, Knobs, refuse_idle

Role = Literal["teacher", "judge", "reward"]
"""The purpose of a model beside the policy, which is its knob below `models`."""
CHECKPOINT = r"^[A-Za-z0-9][A-Za-z0-9._-]*@[0-9]{1,6}$"
"""A checkpoint of this store, `RUN@N`."""


class ServedModel(Servers):
    """A model that vLLM serves beside the policy, on servers of its own."""

    path: str | None = None
    """A transformers folder (safetensors; no pipes, devices or holes), a hub name, or the URI of a checkpoint without
    adapter. Its hash, over weights, configuration and tokenizer, is stored with each of its answers, and the servers
    are proven to hold its weights. A run stops if the model changes under it, unless `run.accept_code` allows that."""
    urls: list[Annotated[URI, Field(pattern=SERVER)]] = []
    """vLLM servers of the model in `path` to use, with the arguments that `inference.urls` describes, for a reward
    model also --runner pooling; empty: the flow starts `replicas`. With workers on a cluster or in several processes
    they must be given. The API key is read from the environment: TEACHER_API_KEY, JUDGE_API_KEY, REWARD_API_KEY.
    Redirects are not followed."""
    replicas: PositiveInt = 1
    """Number of servers that the flow starts, at the first question. Their GPUs are those before the policy's."""
    devices: list[Annotated[str, BeforeValidator(str)]] = []
    """GPUs of the servers, as CUDA_VISIBLE_DEVICES names them, `replicas` times as many as one has; empty: of its own.
    For a card that others use, too, with `gpu_memory_utilization` in proportion."""

    instead: ClassVar[str] = "path"
    """The knob that may say in place of `path` which model it is."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not (self.path or getattr(self, self.instead)):
            raise ValueError("give path: a folder, a hub name or the URI of a checkpoint")
        if self.devices and len(self.devices) != self.replicas * self.ranks:
            raise ValueError(f"devices={self.devices} are not {self.replicas * self.ranks} GPUs, as replicas need")
        if self.urls:
            refuse_idle(self, "replicas", "devices", why="with urls")
        return self


class Teacher(ServedModel):
    """The model whose probabilities `algorithm.type=opd` distils. It must have the policy's tokenizer."""

    checkpoint: Annotated[str, Field(pattern=CHECKPOINT)] | None = None
    """`RUN@N`: checkpoint N of a run of this store, which is verified like any other, instead of `path`. Not vLLM but
    the trainer computes with it, as with a reference policy."""

    instead: ClassVar[str] = "checkpoint"

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.checkpoint:
            refuse_idle(self, *(name for name in Teacher.model_fields if name != "checkpoint"), why="with checkpoint")
        return self


class Judge(ServedModel):
    """The model that the scorer `judge` asks."""

    name: str | None = None
    """Name of the model for the servers at `urls`, if it has no `path`. They may be any service with OpenAI's chat
    completions, such as `urls=[https://api.openai.com]`. Nothing proves which model answers, so its answers are
    stored under this name instead of a hash. Each question may cost money: every turn that this scorer grades is one,
    evaluations included."""
    request: dict[str, Any] = {}
    """Fields of each request to a service, over those that it gets otherwise: `max_tokens` and `temperature` of
    `score.args.judge`, and a `seed`. Without a value (null) a field is left out. For a model that thinks, say
    `request={max_tokens: null, max_completion_tokens: 2000, temperature: null}`. At a `score.args.judge.temperature` of
    0 equal questions are still asked once."""

    instead: ClassVar[str] = "name"

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.name and (self.path or not self.urls):
            raise ValueError(f"name={self.name!r} is for servers without path: give urls, or path alone")
        if self.name:
            refuse_idle(self, *Servers.model_fields, why="with name: the servers are not the pipeline's")
        else:
            refuse_idle(self, "request", why="without name: requests to vLLM are the pipeline's")
        if fixed := self.request.keys() & {"model", "messages", "n", "stream"}:
            raise ValueError(f"request={self.request}: leave out {min(fixed)}, which is the pipeline's")
        return self


class Models(Knobs):
    teacher: Teacher | None = None
    """Teacher of the policy."""
    judge: Judge | None = None
    """Judge of answers, for the scorer `judge`."""
    reward: ServedModel | None = None
    """Reward model, for the scorer `reward-model`: a sequence classifier with one label."""

    def served(self) -> dict[Role, ServedModel]:
        """Return the models that are asked over HTTP, by role."""
        teacher = self.teacher if self.teacher and self.teacher.path else None
        known: dict[Role, ServedModel | None] = {"teacher": teacher, "judge": self.judge, "reward": self.reward}
        return {role: model for role, model in known.items() if model}


WHERE_MODELS_ARE = tuple(
    f"models.{role}.{knob}"
    for role in get_args(Role)
    for knob in sorted(ServedModel.model_fields.keys() - {"dtype", "max_model_len", "extra_args"})
)
"""Knobs that say where models and their servers are, not what they say: their hashes must stay."""
