"""What users of LlamaIndex do."""

from __future__ import annotations

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from steps import CHAT, EMBEDDER, KEY, PERSON, RESULT, URL, WEATHER, WHO, run

OWN = {"model": CHAT, "api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "context_window": 2048}
model = OpenAILike(is_chat_model=True, is_function_calling_model=True, **OWN)
ASKED = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=WHO)]


class Person(BaseModel):
    """A person"""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Current weather of a city"""
    return RESULT


tool = FunctionTool.from_defaults(get_weather)


def chat():
    model.chat(ASKED)
    list(model.stream_chat(ASKED))


def completions():
    plain = OpenAILike(is_chat_model=False, max_tokens=16, **OWN)
    plain.complete("In a small town")
    list(plain.stream_complete("In a small town"))


def tools():
    model.chat_with_tools([tool], user_msg=WEATHER)
    model.predict_and_call([tool], user_msg=WEATHER, allow_parallel_tool_calls=True)


def parsed():
    model.as_structured_llm(Person).complete(PERSON)
    schemed = OpenAILike(is_chat_model=True, should_use_structured_outputs=True, **OWN)
    schemed.as_structured_llm(Person).complete(PERSON)


async def agent():
    await FunctionAgent(tools=[tool], llm=model, system_prompt="Be brief.").run(WEATHER)


def vectors():
    embedder = OpenAILikeEmbedding(model_name=EMBEDDER, api_base=f"{URL}/v1", api_key=KEY, embed_batch_size=2)
    embedder.get_query_embedding("a fox")
    embedder.get_text_embedding_batch(["a fox", "a lamp"])


run(chat, completions, tools, parsed, agent, vectors)
