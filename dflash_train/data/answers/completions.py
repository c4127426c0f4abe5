"""The wire to an OpenAI-compatible server (vLLM, SGLang and others): token ids in, token ids out.

Prompts go to /v1/completions as the ids of our own rendering, so that template and thinking mode are ours. Every
sampling parameter is sent, since servers take what is missing from the model's generation_config.json.
"""

import asyncio
from dataclasses import dataclass
from hashlib import sha256

import httpx

from dflash_train.data.answers.rules import Prompt
from dflash_train.util.errors import UserError
from dflash_train.util.retry import retry_after_s

REFUSED = (400, 413, 422)  # for this prompt's sake: too long, not accepted
BUSY = (408, 409, 425, 429, 503)  # not the prompt's fault
VERSION_PAGES = ("version", "get_server_info", "server_info")  # vLLM's; SGLang's, old and new
VERSION_FACTS = ("version", "model_path", "dtype", "quantization", "kv_cache_dtype", "context_length")
MODEL_FACTS = ("id", "root", "owned_by", "max_model_len")


@dataclass(frozen=True)
class Reply:
    """An answer as the server gave it. token_ids: None where it says only text; finish_reason: "stop" | "length";
    stop: the id it ended at, where that is said."""

    text: str
    token_ids: list[int] | None
    finish_reason: str
    stop: int | None


@dataclass(frozen=True)
class NoReply:
    """Why a prompt gets no answer: "server_refused" | "server_failed"."""

    reason: str
    detail: str


class Retry(Exception):
    """Worth asking again. pause_s: what the server asks for; blame: whether the prompt itself may be the cause."""

    def __init__(self, what: str, pause_s: float = 0.0, blame: bool = True):
        super().__init__(what)
        self.what, self.pause_s, self.blame = what, pause_s, blame


def completion_body(model: str, prompt: Prompt, stop_ids: list[int]) -> dict:
    """What is sent. Parameters beyond OpenAI's own are those that vLLM and SGLang share."""
    sampling = prompt.sampling
    return {
        "model": model,
        "prompt": list(prompt.token_ids),
        "max_tokens": prompt.room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": prompt.seed,
        "stop_token_ids": stop_ids,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "return_token_ids": True,
    }


async def complete(client: httpx.AsyncClient, url: str, prompt: Prompt, body: dict) -> Reply | NoReply:
    """One try at one prompt. Raises Retry for what may pass, UserError for what concerns every prompt."""
    response = await send(client, "POST", f"{url}/completions", body, {"X-Request-Id": request_id(prompt)})
    if response.status_code in REFUSED:
        return NoReply("server_refused", f"HTTP {response.status_code}: {response.text[:300]}")
    choice = read_choice(response)
    read_back = choice.get("prompt_token_ids")
    if read_back is not None and read_back != body["prompt"]:
        raise UserError(f"server {url}", got="it changed the prompt's token ids before answering",
                        want="the ids as they were sent",
                        fix="check its tokenizer options: BOS, truncation")  # fmt: skip
    token_ids = choice.get("token_ids", choice.get("response_token_ids"))
    stops = [choice.get("stop_reason"), choice.get("matched_stop")]  # vLLM's name, SGLang's
    stop = next((value for value in stops if isinstance(value, int)), None)
    return Reply(choice["text"], token_ids, choice["finish_reason"], stop)


def read_choice(response: httpx.Response) -> dict:
    """The one choice of a completion. Raises Retry for a body that was cut, and for an answer that was broken off."""
    try:
        choice = response.json()["choices"][0]
        finish_reason, _ = choice["finish_reason"], choice["text"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise Retry("a body that is no completion") from None
    if finish_reason not in ("stop", "length"):
        raise Retry(f"finish_reason {finish_reason}")
    return choice


async def send(client: httpx.AsyncClient, method: str, url: str, body: dict | None = None,
               headers: dict | None = None) -> httpx.Response:  # fmt: skip
    """One request; a response of status 2xx or REFUSED. Raises Retry or UserError for any other end."""
    response = await whole(client, client.build_request(method, url, json=body, headers=headers))
    status = response.status_code
    if status in BUSY or status >= 500:
        raise Retry(f"HTTP {status}", retry_after_s(response.headers.get("Retry-After")), blame=status not in BUSY)
    if status >= 300 and status not in REFUSED:
        fixes = {
            401: "export its key under the name of data.answers.client.key_env",
            404: "data.answers.server ends in /v1, and data.answers.client.model is one that it serves",
        }
        fix = fixes[401 if status == 403 else status] if status in (401, 403, 404) else None
        raise UserError(f"server {url}", got=f"HTTP {status}: {response.text[:300]}", want="an answer", fix=fix)
    return response


async def whole(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """The response with all of its body. Raises Retry where it does not come.

    The client's own timeouts are for one read each: an answer that drips would hold its slot for ever.
    """
    limit_s = client.timeout.read
    try:
        async with asyncio.timeout(limit_s):
            return await client.send(request)
    except TimeoutError:
        raise Retry(f"no whole answer within data.answers.client.timeout_s={limit_s:g}") from None
    except httpx.RequestError as error:  # refused, cut, silent, undecodable
        nobody_there = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
        raise Retry(f"{type(error).__name__} {error}".strip(), blame=not nobody_there) from None


def request_id(prompt: Prompt) -> str:
    """The same for the same question, so that the server's log can tell a question that came twice."""
    return sha256(repr((list(prompt.token_ids), prompt.sampling, prompt.room, prompt.seed)).encode()).hexdigest()[:32]


async def served_models(client: httpx.AsyncClient, url: str) -> dict[str, dict]:
    """Model id -> what the server says of it. Raises Retry or UserError."""
    response = await send(client, "GET", f"{url}/models")
    try:
        models = response.json()["data"]
        return {model["id"]: {key: model[key] for key in MODEL_FACTS if key in model} for model in models}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"server {url}/models", got=response.text[:300], want="a list of models, as OpenAI writes it",
                        fix="data.answers.server=http://host:port/v1") from None  # fmt: skip


async def version_facts(client: httpx.AsyncClient, url: str) -> dict:
    """Version and settings, where the server has a page that says them. Nothing else is kept: it may hold keys."""
    facts = {}
    for page in VERSION_PAGES:
        try:
            said = (await whole(client, client.build_request("GET", f"{url.removesuffix('/v1')}/{page}"))).json()
        except (Retry, ValueError):
            continue  # a server without this page is no worse
        facts |= {key: said[key] for key in VERSION_FACTS if isinstance(said, dict) and key in said}
    return facts
