"""The drifts of figures that each scenario shows on vLLM 0.32, by drift.

A scenario that is not named here shows none of it. ``kvledger.audit.checks.figures`` says why.
"""

_SCENARIOS = {
    "prompt-missing": """
        abort_before_output_sync abort_everywhere_sync aborted_in_prefill crowd_async
        crowd_async_speculative
        abort_in_flight_async abort_in_flight_sync
        withdrawn_step_then_abort_async withdrawn_step_then_abort_sync
    """,
    "session-chunk-missing": """
        session_async session_async_speculative session_of_states_async session_of_states_sync
        session_speculative session_sync session_token_replaced session_with_three_batches
    """,
    "full-hit-token-missing": """
        external_async_async external_async_consumer external_async_sync full_external_hit
        resumed_beside_a_finished_load_async resumed_beside_a_finished_load_sync
        whole_prompt_is_loaded_chunks whole_prompt_is_loaded_sliding
    """,
    "replay-missing": """
        replayed_window_async replayed_window_sync
    """,
    "recomputed-prompt-missing": """
        image_of_a_request_preempted_in_its_step
        load_failure_after_a_preemption_async load_failure_after_a_preemption_sync
        crowd_async crowd_async_consumer crowd_async_external crowd_async_speculative crowd_external
        crowd_hybrid crowd_sync double_allocation_after_preemption_two_groups
        external_preempted_async external_preempted_sync load_failure_recomputed_in_chunks_async
        load_failure_in_a_window_sync
        load_failure_recomputed_in_chunks_sync load_failure_sync_async load_failure_sync_sync
        load_failure_then_reset local_hit_fails_async local_hit_fails_sync
        preempted_in_prefill_async preempted_in_prefill_sync reset_running_async
        reset_running_speculative reset_running_sync
        load_failure_read_by_a_neighbour
    """,
    "chunks-in-one-step": """
        image_in_chunks_async image_in_chunks_sync image_of_a_request_preempted_in_its_step
        image_twice_in_a_prompt_async image_twice_in_a_prompt_sync
        chunked_async chunked_prefill chunked_sync crowd_async crowd_async_consumer
        crowd_async_external crowd_async_speculative crowd_external crowd_hybrid crowd_sync
        external_preempted_async external_preempted_sync hybrid_async hybrid_external hybrid_sync
        load_failure_recomputed_in_chunks_async load_failure_recomputed_in_chunks_sync pooling_async
        pooling_sync
        preempt_forced_async preempt_forced_sync preempt_prefill_async preempt_prefill_consumer
        preempt_prefill_external preempt_prefill_sync preempted_in_prefill_async
        preempted_in_prefill_sync prompt_ends_within_a_block
        reset_running_async reset_running_speculative reset_running_sync
        resumed_with_chunks_in_flight_producer session_async session_async_speculative
        session_of_states_async session_of_states_sync
        session_speculative session_sync speculative_async speculative_async_eagle speculative_eagle
        speculative_sync states_cut_async states_cut_sync states_hit_between_checkpoints_async
        states_hit_between_checkpoints_sync window_leaves_blocks_three_groups
        window_leaves_blocks_two_groups chunks_leave_blocks
        load_failure_read_by_a_neighbour
        abort_in_flight_async abort_in_flight_sync states_in_one_step_async states_in_one_step_sync
        withdrawn_state_async withdrawn_state_sync
    """,
    "later-source-missing": """
        asked_again_after_preemption
        withdrawn_step_async withdrawn_step_sync
    """,
    "failed-hit-reported": """
        load_failure_of_a_shared_block_async local_hit_fails_async local_hit_fails_sync
    """,
    "transfer-as-cached": """
        handed_over_sync
    """,
    "cache-write-overstated": """
        asked_again_after_preemption
        withdrawn_step_async withdrawn_step_sync
    """,
    "lookup-never-ran": """
        abort_before_output_async abort_before_output_sync abort_everywhere_async
        abort_everywhere_sync aborted_in_remote_wait asynchronous_load_fails_wholly
        load_failure_as_a_whole_async load_failure_as_a_whole_groups load_failure_as_a_whole_sync
        load_failure_async_policy_fail_async load_failure_async_policy_fail_sync
        load_failure_async_total_async load_failure_async_total_sync
        load_failure_of_a_shared_block_async
    """,
    "lookup-load-failed": """
        load_failure_after_a_preemption_async load_failure_after_a_preemption_sync
        asynchronous_load_fails_in_part asynchronous_load_fails_wholly load_failure_as_a_whole_async
        load_failure_as_a_whole_groups load_failure_as_a_whole_sync load_failure_async_partial_async
        load_failure_async_partial_sync load_failure_async_policy_fail_async
        load_failure_async_policy_fail_sync load_failure_async_total_async
        load_failure_async_total_sync load_failure_of_a_shared_block_async
        load_failure_in_a_window_loads_async load_failure_in_a_window_sync
        load_failure_recomputed_in_chunks_async load_failure_recomputed_in_chunks_sync
        load_failure_sync_async load_failure_sync_before_next_output_async
        load_failure_sync_policy_fail_async load_failure_sync_policy_fail_sync
        load_failure_sync_sync load_failure_then_reset local_hit_fails_async local_hit_fails_sync
        load_failure_read_by_a_neighbour
    """,
    "lookup-resumed-missing": """
        image_of_a_request_preempted_in_its_step
        load_failure_after_a_preemption_async load_failure_after_a_preemption_sync
        asked_again_after_preemption crowd_async crowd_async_consumer crowd_async_external
        crowd_async_speculative crowd_external crowd_hybrid crowd_sync
        double_allocation_after_preemption_two_groups external_preempted_async
        external_preempted_sync hit_beside_a_resumed_request_async hit_beside_a_resumed_request_sync
        load_failure_then_reset preempt_decode_async preempt_decode_async_speculative
        preempt_decode_speculative preempt_decode_sync preempt_forced_async preempt_forced_sync
        preempt_prefill_async preempt_prefill_consumer preempt_prefill_external preempt_prefill_sync
        preempted_in_flight_delivered preempted_in_flight_dropped preempted_in_prefill_async
        preempted_in_prefill_sync priority_async priority_sync reset_running_async
        reset_running_speculative reset_running_sync resumed_beside_a_finished_load_async
        resumed_beside_a_finished_load_sync resumed_cold resumed_from_cache
        resumed_local_then_external resumed_with_chunks_in_flight_producer
        withdrawn_state_async withdrawn_state_sync withdrawn_step_async withdrawn_step_sync
    """,
    "lookup-exempt-counted": """
        prompt_logprobs_async prompt_logprobs_sync
    """,
    "drafts-past-stop": """
        crowd_async_speculative padded_decode_async padded_decode_sync
        preempt_decode_async_speculative speculative_async speculative_async_eagle speculative_eagle
        speculative_sync stop_within_drafts stopped_within_drafts_async stopped_within_drafts_sync
        withdrawn_state_async withdrawn_state_sync
    """,
    "padding-as-drafts": """
        padded_decode_async padded_decode_sync
    """,
    "samples-counted-each": """
        samples_of_one_request_async samples_of_one_request_sync
    """,
}

DRIFTS = {drift: frozenset(names.split()) for drift, names in _SCENARIOS.items()}
