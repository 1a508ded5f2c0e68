#!/usr/bin/env python3
"""Makes the Grafana dashboards in dashboards/. With --check it compares them with the files instead.

A panel is a title, a unit, and queries with their legends. Grafana replaces $__rate_interval.
"""

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "baton-prometheus"}


def rate(metric, by="", more=""):
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{more}}}[$__rate_interval]))"


def rare(metric, by="", more=""):
    """A rate that is 0 while the event was never counted."""
    return f"{rate(metric, by, more)} or vector(0)"


def quantiles(metric, by="", more=""):
    """The median, the 95th and the 99th percentile of a histogram."""
    name = "".join(f"{{{{{label}}}}} " for label in by.split(", ") if label)
    labels = f"le, {by}" if by else "le"
    return [(f"histogram_quantile({q}, {rate(metric + '_bucket', labels, more)})", f"{name}p{round(q * 100)}") for q in (0.5, 0.95, 0.99)]


def percentile(metric, q, by, more=""):
    return f"histogram_quantile({q}, {rate(metric + '_bucket', 'le, ' + by, more)})"


CLUSTER = [
    ("Processes that answer", "short", [('sum by (job) (up{job="baton"})', "up"), ('count by (job) (up{job="baton"})', "known")]),
    ("Nodes by role", "short", [('count by (role) (baton_build_info{process="node"})', "{{role}}"), ("sum by (role) (baton_node_asleep)", "{{role}} asleep")]),
    ("Requests by outcome", "reqps", [(rate("baton_router_requests_total", "outcome"), "{{outcome}}")]),
    ("Requests under way", "short", [
        ("sum by (place) (baton_router_requests_running)", "running: {{place}}"),
        ("sum by (place) (baton_router_requests_waiting)", "waiting: {{place}}"),
    ]),
    ("Time to first token", "s", quantiles("baton_router_first_token_seconds")),
    ("Gap between tokens", "s", quantiles("baton_router_token_gap_seconds")),
    ("Tokens", "short", [
        (rate("baton_router_prompt_tokens_total", "model"), "{{model}} prompt"),
        (rate("baton_router_output_tokens_total", "model"), "{{model}} output"),
    ]),
    ("KV memory in use", "percentunit", [
        ('sum by (role) (baton_node_kv_blocks{state="leased"}) / (sum by (role) (baton_node_kv_blocks) > 0)', "{{role}}"),
    ]),
    ("Prompt tokens to compute", "short", [("sum by (role, instance) (baton_node_queued_tokens)", "{{role}} {{instance}}")]),
    ("Sequences", "short", [
        ("sum by (role) (baton_node_running)", "{{role}} running"),
        ("sum by (role) (baton_node_waiting)", "{{role}} waiting for room"),
    ]),
    ("Step of the model, p95", "s", [(percentile("baton_node_step_seconds", 0.95, "role"), "{{role}}")]),
    ("Prompt tokens found in prefix caches", "percentunit", [
        (f'{rate("baton_node_cached_tokens_total", "role")} / ({rate("baton_node_cached_tokens_total", "role")} + {rate("baton_node_prefill_tokens_total", "role")})', "{{role}}"),
    ]),
]

ROUTER = [
    ("Refusals by code", "reqps", [(rate("baton_router_refusals_total", "code"), "{{code}}")]),
    ("Routes tried, and failed", "reqps", [
        (rate("baton_router_attempts_total"), "tried"),
        (rare("baton_router_retries_total", "reason"), "failed: {{reason}}"),
    ]),
    ("Streams continued elsewhere", "reqps", [(rate("baton_router_continuations_total"), "continued")]),
    ("Stages of a request, p95", "s", [(percentile("baton_router_stage_seconds", 0.95, "stage"), "{{stage}}")]),
    ("Whole requests", "s", quantiles("baton_router_request_seconds", "model")),
    ("First token by model, p95", "s", [(percentile("baton_router_first_token_seconds", 0.95, "model"), "{{model}}")]),
    ("Connections refused", "short", [(rare("baton_router_connections_refused_total", "port, reason"), "{{port}} {{reason}}")]),
    ("Callers refused", "short", [
        (rare("baton_router_callers_refused_total", "what, reason"), "router: {{what}} {{reason}}"),
        (rare("baton_node_callers_refused_total", "what, reason"), "nodes: {{what}} {{reason}}"),
    ]),
    ("Requests over a limit of their tenant", "reqps", [
        (rare("baton_router_tenant_refusals_total", "tenant, limit"), "{{tenant}} {{limit}}"),
        (rare("baton_router_unauthorized_total", "reason"), "without a key: {{reason}}"),
    ]),
    ("Processor time", "percentunit", [("rate(process_cpu_seconds_total[$__rate_interval])", "{{instance}}")]),
    ("Memory", "bytes", [("process_resident_memory_bytes", "{{instance}}")]),
    ("Open files and sockets", "percentunit", [("process_open_fds / process_max_fds", "{{instance}}")]),
]

TRANSFERS = [
    ("KV by connector", "Bps", [(rate("baton_node_kv_transfer_bytes_total", "connector, direction"), "{{connector}} {{direction}}")]),
    ("Rate of one transfer", "Bps", quantiles("baton_node_kv_transfer_bytes_per_second", "connector")),
    ("Transfers by outcome", "ops", [(rate("baton_node_kv_transfers_total", "connector, direction, outcome"), "{{connector}} {{direction}} {{outcome}}")]),
    ("Transfer, from landing to handoff", "s", quantiles("baton_router_stage_seconds", "", 'stage="transfer"')),
    ("Gap at the handover", "s", quantiles("baton_router_stage_seconds", "", 'stage="handover_gap"')),
    ("Wait for KV room, p95", "s", [
        (percentile("baton_node_room_wait_seconds", 0.95, "role"), "{{role}}"),
        (percentile("baton_router_stage_seconds", 0.95, "stage", 'stage="reserve"'), "router: {{stage}}"),
    ]),
    ("Landings open", "short", [("sum by (role, instance) (baton_node_landings_open)", "{{role}} {{instance}}")]),
    ("Blocks that a remote write may still reach", "short", [("sum by (instance) (baton_node_kv_quarantined_blocks)", "{{instance}}")]),
    ("Corrupt pages fetched again", "ops", [(rare("baton_node_kv_refetched_pages_total", "connector"), "{{connector}}")]),
    ("Blocks by state", "short", [("sum by (role, state) (baton_node_kv_blocks)", "{{role}} {{state}}")]),
    ("Pool: sequences put and fetched", "ops", [
        (rate("baton_node_puts_total", "outcome"), "put: {{outcome}}"),
        (rate("baton_node_deliveries_total", "outcome"), "fetched: {{outcome}}"),
        (rare("baton_router_pool_fallbacks_total", "reason"), "held by prefill: {{reason}}"),
    ]),
    ("Pool: tokens whose KV was there already", "percentunit", [
        (f'{rate("baton_node_held_tokens_total")} / {rate("baton_node_put_tokens_total")}', "there"),
    ]),
]

# GPUs by the node's address and its number for them. `baton_node_gpu_info` has their names.
GPUS = [
    ("Computing", "percentunit", [('baton_node_gpu_utilization_ratio{part="compute"}', "{{instance}} {{gpu}}")]),
    ("Reading or writing memory", "percentunit", [('baton_node_gpu_utilization_ratio{part="memory"}', "{{instance}} {{gpu}}")]),
    ("Memory in use", "bytes", [
        ('baton_node_gpu_memory_bytes{state="used"}', "{{instance}} {{gpu}}"),
        ("sum by (instance, gpu) (baton_node_gpu_memory_bytes)", "{{instance}} {{gpu}} usable"),
    ]),
    ("Power", "watt", [
        ("baton_node_gpu_power_watts", "{{instance}} {{gpu}}"),
        ("baton_node_gpu_power_limit_watts", "{{instance}} {{gpu}} limit"),
    ]),
    ("Clocks", "hertz", [("baton_node_gpu_clock_hertz", "{{instance}} {{gpu}} {{clock}}")]),
    ("Temperature", "celsius", [("baton_node_gpu_temperature_celsius", "{{instance}} {{gpu}}")]),
    ("Energy of an output token", "joule", [
        (f'sum(baton_node_gpu_power_watts) / {rate("baton_router_output_tokens_total")}', "all GPUs"),
    ]),
    ("GPUs by name", "short", [("count by (name) (baton_node_gpu_info)", "{{name}}")]),
]

DASHBOARDS = {"cluster": ("Baton: cluster", CLUSTER), "router": ("Baton: router", ROUTER), "transfers": ("Baton: transfers", TRANSFERS), "gpus": ("Baton: GPUs", GPUS)}


def panel(nth, title, unit, queries):
    """One of two panels in a row."""
    targets = [{"refId": chr(ord("A") + at), "expr": expr.replace("{}", ""), "legendFormat": legend} for at, (expr, legend) in enumerate(queries)]
    return {
        "id": nth + 1,
        "type": "timeseries",
        "title": title,
        "datasource": DATASOURCE,
        "gridPos": {"x": 12 * (nth % 2), "y": 8 * (nth // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def dashboard(name, title, panels):
    return {
        "uid": f"baton-{name}",
        "title": title,
        "tags": ["baton"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": [panel(nth, *one) for nth, one in enumerate(panels)],
    }


def main():
    for name, (title, panels) in DASHBOARDS.items():
        file, text = FOLDER / f"{name}.json", json.dumps(dashboard(name, title, panels), indent=1) + "\n"
        if "--check" not in sys.argv:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            sys.exit(f"{file} is not what {__file__} makes: run it")


if __name__ == "__main__":
    main()
