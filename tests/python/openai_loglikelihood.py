"""Asks for log-likelihoods with the official OpenAI client, with the fields that lm-eval's `local-completions` sends.

Usage: openai_loglikelihood.py http://127.0.0.1:8000/v1
"""

import sys

import openai


def loglikelihood(client, model, prompt, n_context, max_tokens):
    """The sum of the log-probabilities after the context, and whether greedy decoding gives the same tokens."""
    answer = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=max_tokens, logprobs=1,
                                       seed=1234, echo=True)
    logprobs = answer.choices[0].logprobs
    end = -1 if max_tokens else None
    assert len(logprobs.token_logprobs[:end]) == len(prompt), logprobs
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None, logprobs
    chosen, top = logprobs.token_logprobs[n_context:end], logprobs.top_logprobs[n_context:end]
    return sum(chosen), all(one == max(others.values()) for one, others in zip(chosen, top))


def main(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    model = client.models.list().data[0].id
    text = "The router is the front door of the cluster. " * 3
    answer = client.completions.create(model=model, prompt=text, temperature=0, max_tokens=8, logprobs=1,
                                       extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    context, continuation = choice.prompt_token_ids, choice.token_ids
    for max_tokens in (0, 1):
        greedy = loglikelihood(client, model, context + continuation, len(context), max_tokens)
        assert greedy[1], "greedy decoding gave these tokens"
        difference = abs(greedy[0] - sum(choice.logprobs.token_logprobs))
        assert difference < 0.05, f"{difference}: the answer has the log-probabilities that it has as a prompt"
        other = continuation[:-1] + [continuation[-1] ^ 1]
        less = loglikelihood(client, model, context + other, len(context), max_tokens)
        assert not less[1] and less[0] < greedy[0], (less, greedy)
    alone = client.completions.create(model=model, prompt=context, max_tokens=0, echo=True)
    assert alone.usage.completion_tokens == 0 and alone.choices[0].text.strip() == text.strip(), alone


main(sys.argv[1])
