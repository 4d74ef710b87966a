"""Twenty-five questions with the SQL that answers each, for docs/reference/tables.md. A test runs all."""

from __future__ import annotations

from typing import NamedTuple


class Question(NamedTuple):
    """A question in words, and its answer as one SELECT for ``kvledger query``."""

    words: str
    sql: str


QUESTIONS = (
    Question(
        "What share of prompt tokens was hit, by model?",
        "select model, (sum(local) + sum(external)) / sum(prompt_tokens) as hit_share from requests group"
        " by model",
    ),
    Question(
        "How did the hit rate change from hour to hour?",
        "select date_trunc('hour', closed_time) as hour, sum(local) / sum(prompt_tokens) as local_share "
        "from requests group by hour order by hour",
    ),
    Question(
        "Which requests computed most tokens again?",
        "select request_id, preemptions, rework, scheduled from requests where rework > 0 order by rework"
        " desc limit 10",
    ),
    Question(
        "Why were tokens computed again?",
        "select cause, sum(tokens) as tokens, count(*) as requests from causes where figure = 'rework' "
        "group by cause order by tokens desc",
    ),
    Question(
        "Why did prompt tokens miss the caches, by hour?",
        "select date_trunc('hour', closed_time) as hour, cause, sum(tokens) as tokens from causes where "
        "figure = 'missed' group by hour, cause order by hour, tokens desc",
    ),
    Question(
        "How long do requests wait: median, 95th and 99th percentile in seconds?",
        "select quantile_disc(waited_microseconds / 1e6, [0.5, 0.95, 0.99]) as seconds from requests",
    ),
    Question(
        "How long until the first output, and what share of it were requests queued, by adapter?",
        "select lora, quantile_disc(first_token_microseconds / 1e6, 0.95) as p95_seconds, "
        "sum(queued_microseconds) / sum(first_token_microseconds) as queued_share, count(*) as requests "
        "from requests where first_token_microseconds is not null group by lora",
    ),
    Question(
        "Which tenant has most of the misses? (KVLEDGER_GROUP finds it in the request id.)",
        "select request_group, sum(missed) as missed, sum(prompt_tokens) as prompt_tokens from requests "
        "group by request_group order by missed desc nulls last",
    ),
    Question(
        "How many tokens did the connector promise and not load, and why?",
        "select cause, sum(tokens) as tokens from causes where figure = 'voided' group by cause order by "
        "tokens desc",
    ),
    Question(
        "Did asynchronous loads save more time than requests waited for them?",
        "select engines.engine, sum(load_waited_microseconds) / 1e6 as waited_seconds, "
        "sum(asynchronous_tokens) * any_value(prefill_seconds) as asynchronous_saved_seconds from "
        "requests join engines using (journal) group by engines.engine",
    ),
    Question(
        "Where does the engine report other hits than the ledger settled?",
        "select request_id, local, reported_local, external, reported_external from requests where "
        "reported_local is not null and (local, external) != (reported_local, reported_external) limit 20",
    ),
    Question(
        "What explains the difference between planned and settled tokens?",
        "select step, cause, count(*) as requests, sum(local) as local, sum(external) as external from "
        "differences group by step, cause order by requests desc",
    ),
    Question(
        "Which findings are there, and in how many requests?",
        "select id, severity, count(distinct request_id) as requests, min(time) as first from findings "
        "group by id, severity order by requests desc",
    ),
    Question(
        "What do requests with a violation have in common?",
        "select verdict, count(*) as requests, avg(preemptions) as preemptions, avg(prompt_tokens) as "
        "prompt_tokens from requests group by verdict",
    ),
    Question(
        "How long are prompts and outputs?",
        "select quantile_disc(prompt_tokens, [0.5, 0.95]) as prompt, quantile_disc(output_tokens, [0.5, "
        "0.95]) as output from requests where unknown is null",
    ),
    Question(
        "Does a longer prompt hit less?",
        "select floor(log2(greatest(prompt_tokens, 1))) as log2_tokens, sum(local) / sum(prompt_tokens) "
        "as local_share, count(*) as requests from requests where prompt_tokens > 0 group by log2_tokens "
        "order by log2_tokens",
    ),
    Question(
        "How many requests ran and waited at most, by engine?",
        "select engine, max(running) as running, max(waiting) as waiting from activity group by engine",
    ),
    Question(
        "Which share of engine time went into tokens that were computed again?",
        "select engines.engine, sum(rework) * any_value(prefill_seconds) / any_value(busy_seconds) as "
        "share from requests join engines using (journal) group by engines.engine",
    ),
    Question(
        "How do releases compare?",
        "select version, count(*) as requests, sum(rework) / sum(scheduled) as rework_share, sum(local) /"
        " sum(prompt_tokens) as local_share from requests join engines using (journal) group by version",
    ),
    Question(
        "Which requests are unknown, and why?",
        "select unknown, count(*) as requests, min(added_time) as first from requests where unknown is "
        "not null group by unknown",
    ),
    Question(
        "Which share of the blocks ran, by hour? (This and the next ones need a journal of level blocks.)",
        "select date_trunc('hour', time) as hour, sum(running_microseconds) / sum(running_microseconds + "
        "cached_microseconds + empty_microseconds + unknown_microseconds) as share from block_use group by "
        "hour order by hour",
    ),
    Question(
        "How many seconds did content stay in the cache before it was evicted?",
        "select seconds, sum(contents) as contents from (select unnest(map_keys(lifetimes)) as seconds, "
        "unnest(map_values(lifetimes)) as contents from block_use) group by seconds order by seconds",
    ),
    Question(
        "How many blocks did admissions hit, the first of a request and later ones?",
        "select resumed, count(*) as admissions, quantile_disc(hit_blocks, [0.5, 0.95]) as hit_blocks from "
        "admissions group by resumed",
    ),
    Question(
        "Which content was computed most often?",
        "select hash_id, count(*) as times from (select unnest(hash_ids) as hash_id from block_operations "
        "where operation = 'cached') group by hash_id having times > 1 order by times desc limit 10",
    ),
    Question(
        "What did each tenant use in a month, to charge it? (A request without a complete account is only "
        "counted. Each sample of a prompt is a request. With a prefill and a decode engine, take prompts "
        "from the journals of the one and outputs from those of the other.)",
        "select coalesce(request_group, salt) as tenant, model, sum(local + external) as cached, "
        "sum(computed) as computed, sum(output_tokens) as output_tokens, count(*) as requests, "
        "count(unknown) as unknown from requests where date_trunc('month', closed_time) = "
        "timestamp '2026-11-01' group by tenant, model order by tenant, model",
    ),
)
