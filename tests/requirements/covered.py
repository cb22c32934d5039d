"""Which tests hold which requirement. Each name is checked to be that of a test that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COVERED: Mapping[str, Sequence[str]] = {
    "R01": (  # streams cut anywhere
        "tests/unit/gateway/test_relay.py::test_any_cut_gives_the_same_bytes_and_the_same_usage",
        "tests/unit/gateway/test_relay.py::test_byte_by_byte_damages_no_character",
        "tests/property/test_translated_answers_property.py::test_r01_any_cut_gives_the_same_bytes_and_the_same_counts",
    ),
    "R02": (  # a definite end and no invented finish
        "tests/integration/test_gateway_http.py::test_a_truncated_stream_ends_with_an_error_and_its_row_says_so",
        "tests/unit/gateway/test_relay.py::test_a_stream_that_stops_gets_an_error_and_an_end_and_no_finish",
        "tests/integration/test_translated_streams.py::test_b005_an_end_without_a_finish_reason_is_no_answer",
    ),
    "R03": (  # a client that leaves
        "tests/integration/test_gateway_http.py::test_a_client_that_leaves_stops_the_engine",
        "tests/integration/test_gateway_http.py::test_clients_that_leave_at_any_point_leave_nothing_behind",
        "tests/integration/test_translated_streams.py::test_r03_a_client_that_leaves_stops_the_engine",
    ),
    "R04": (  # clients that do not read
        "tests/unit/gateway/test_front.py::test_a_client_that_takes_nothing_is_given_up_whatever_is_to_be_sent",
        "tests/fault/test_aborts.py::test_a_client_that_takes_nothing_of_whole_answers_holds_no_place",
        "tests/unit/gateway/test_relay.py::test_one_event_is_bounded",
        "tests/integration/test_idle_connections.py::test_who_says_nothing_more_is_hung_up_on",
        "tests/unit/gateway/test_bodies.py::test_any_other_is_refused_by_name",
    ),
    "R05": (  # heartbeats
        "tests/unit/gateway/test_relay.py::test_comments_go_through_and_heartbeats_fill_silence",
        "tests/integration/test_gateway_http.py::test_heartbeats_before_the_engines_first_byte_and_errors_after_them",
        "tests/integration/test_translated_streams.py::"
        "test_r05_silence_is_filled_and_a_late_refusal_is_the_protocols_error",
    ),
    "R06": (  # the client's bytes
        "tests/integration/test_gateway_http.py::test_the_engine_gets_the_clients_bytes_and_what_the_gateway_needs",
        "tests/integration/test_gateway_http.py::test_a_huge_prompt_goes_through_byte_for_byte",
    ),
    "R07": (  # refusals in the endpoint's shape
        "tests/integration/test_gateway_http.py::test_bad_requests_end_at_the_gateway_in_openais_shape",
        "tests/integration/test_gateway_http.py::test_an_engines_refusal_goes_through_untried_elsewhere",
        "tests/fault/test_failover_policy.py::test_b065_client_errors_open_no_breaker",
        "tests/integration/test_openapi_document.py::test_answers_and_errors_are_what_it_says",
        "tests/property/test_hostile_requests_property.py::test_any_json_is_read_or_refused",
        "tests/integration/test_hostile_bodies.py::test_r07_what_agents_send",
        "tests/integration/test_errors_for_official_clients.py::test_what_the_gateway_refuses",
        "tests/integration/test_errors_for_official_clients.py::test_what_the_engine_refuses_or_fails_at",
    ),
    "R08": (  # secrets
        "tests/requirements/test_r08_secrets_stay_here.py::test_a_secret_is_said_nowhere",
        "tests/requirements/test_r08_secrets_stay_here.py::test_hostile_request_ids_and_traces_are_not_believed",
        "tests/integration/test_gateway_http.py::test_only_allowlisted_headers_pass",
        "tests/integration/test_gateway_http.py::test_malformed_http_is_refused_and_not_quoted_in_the_log",
    ),
    "R11": (  # memory and series under many users
        "tests/unit/tracing/test_metrics.py::test_the_number_of_series_does_not_grow_with_what_clients_send",
        "tests/unit/tracing/test_run_linker.py::test_memory_is_bounded_whatever_arrives",
        "tests/property/test_beginnings_property.py::test_memory_stays_within_its_bound_and_the_oldest_ends_go_first",
    ),
    "R14": (  # engines that die
        "tests/integration/test_gateway_http.py::test_a_dead_engine_is_left_out_after_its_first_refused_connection",
        "tests/integration/test_gateway_http.py::test_an_engine_that_comes_back_is_used_again",
        "tests/fault/test_failover_policy.py::test_nothing_new_goes_to_an_instance_after_its_first_refused_connection",
        "tests/fault/test_failover_policy.py::test_b045_models_are_listed_while_engines_are_down",
        "tests/fault/test_failover_policy.py::"
        "test_b066_a_failing_engine_is_left_alone_and_gets_traffic_within_one_period",
        "tests/unit/gateway/test_absence.py::test_a_probe_that_was_silent_has_been_the_wait_for_the_next_one",
    ),
    "R15": (  # attempts
        "tests/integration/test_gateway_http.py::test_what_may_have_run_is_never_sent_again",
        "tests/fault/test_failover_policy.py::test_r15_b063_attempts_stay_under_the_cap_under_every_setting",
        "tests/fault/test_failover_policy.py::test_what_may_run_again_is_seen_to_have",
        "tests/unit/engine_adapter/test_wire_client.py::test_a_request_that_may_have_been_read_is_sent_once",
        "tests/integration/test_gateway_http.py::test_when_all_are_busy_the_refusal_is_shown_with_its_retry_after",
    ),
    "R17": (  # Redis away
        "tests/unit/gateway/test_limits.py::test_a_silent_redis_costs_its_deadline_once_and_one_line_each_way",
        "tests/fault/test_pool_faults.py::test_a_paused_server_costs_one_deadline_and_comes_back",
    ),
    "R19": (  # tenants apart
        "tests/requirements/test_r19_tenants_apart.py::test_a_hostile_tenant_learns_nothing",
        "tests/integration/test_gateway_http.py::test_keys_let_in_and_salts_keep_tenants_apart",
        "tests/integration/test_gateway_embedded.py::test_another_salt_shares_nothing",
        "tests/integration/test_engine_server.py::test_a_repeated_prompt_hits_the_device_and_a_salt_does_not",
        "tests/unit/gateway/test_identity.py::test_a_client_narrows_its_namespace_and_never_leaves_it",
        "tests/property/test_beginnings_property.py::test_what_one_caller_sent_is_not_known_to_another",
        "tests/unit/tracing/test_run_linker.py::test_two_keys_never_share_a_run",
    ),
    "R20": (  # one row
        "tests/integration/test_gateway_http.py::test_an_answer_comes_back_with_its_row",
        "tests/fault/test_ledger_kill.py::test_a_request_that_was_in_flight_when_its_process_died_has_a_row",
        "tests/unit/tracing/test_metrics.py::test_counters_equal_the_records_exactly",
    ),
    "R21": (  # unpriced is never 0
        "tests/unit/billing/test_meter.py::test_what_is_not_known_is_unpriced_and_never_zero",
        "tests/integration/test_gateway_budgets.py::test_a_model_without_a_price_is_refused_by_a_money_budget",
    ),
    "R22": (  # limits and budgets in parallel
        "tests/fault/test_limit_processes.py::test_in_each_window_exactly_the_limit_is_admitted",
        "tests/fault/test_limit_processes.py::"
        "test_never_more_at_once_than_the_limit_and_room_again_after_a_process_died",
        "tests/unit/gateway/test_limits.py::test_all_rules_are_taken_under_or_none",
        "tests/unit/gateway/test_limits.py::test_a_refund_goes_to_the_window_that_was_taken_from",
        "tests/integration/test_limits_and_guard.py::"
        "test_no_more_at_once_than_allowed_and_room_again_whatever_became_of_them",
        "tests/fault/test_budget_processes.py::test_a_file_admits_exactly_the_limit_in_each_window",
        "tests/fault/test_budget_processes.py::test_redis_admits_exactly_the_limit_in_each_window",
    ),
    "R23": (  # traces and metrics
        "tests/unit/tracing/test_spans.py::test_the_tree_is_client_gateway_attempt_engine",
        "tests/unit/tracing/test_spans.py::test_a_span_is_bounded_and_encodable_whatever_the_record_holds",
        "tests/e2e/test_several_workers.py::test_what_one_worker_knows_all_know",
        "tests/unit/gateway/test_workers.py::test_a_sum_over_workers_never_falls_whoever_is_asked_and_whoever_dies",
    ),
    "R24": (  # a huge prompt
        "tests/integration/test_gateway_http.py::test_a_huge_prompt_goes_through_byte_for_byte",
    ),
    "R25": (  # going down
        "tests/integration/test_gateway_http.py::test_shutdown_lets_streams_finish_and_cuts_what_stays",
        "tests/e2e/test_several_workers.py::"
        "test_sigterm_lets_streams_of_all_workers_finish_and_a_second_one_ends_at_once",
        "tests/unit/tracing/test_span_export.py::test_a_silent_backend_holds_neither_requests_nor_the_end",
    ),
}

ELSEWHERE = frozenset({"R09", "R10", "R12", "R13", "R16", "R18"})
"""Of routing keys, events, placement, pages and store caps: the index's, the engines' and the store's own suites."""
