"""Which simulated world notices a planted bug.

``python -m tests.simulation.planted`` searches again and prints the table ``SEEN_AT``, after worlds have changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from chairlift_lab.sim.minimise import failure_of
from chairlift_lab.sim.world import make_world

__all__ = ["SEEN_AT", "check_is_found", "check_some_world_finds"]

Patch = Callable[[Any, str, Any], None]
Plant = Callable[[Patch], None]

SEEN_AT: dict[str, int] = {
    "a_row_has_two_chunks_in_a_step": 7,
    "abort_leaves_waiting_request_in_queue": 13,
    "abort_matches_by_prefix": 23,
    "aborted_request_is_still_compiled_for": 14,
    "aborted_request_keeps_its_tiles": 14,
    "accepted_after_a_mismatch": 2,
    "adapter_lost_on_the_way_to_the_rows": 54,
    "adapter_of_the_row_before_kept": 154,
    "adapters_counted_once_per_vacated_row": 54,
    "adapters_evicted_while_in_use": 154,
    "adapters_known_by_name": 154,
    "adapters_of_a_step_in_the_order_of_slots": 154,
    "answer_one_token_too_long": 0,
    "answer_that_reached_a_limit_keeps_its_row": 2_099,
    "answers_of_a_request_share_a_matcher": 19,
    "block_in_use_evicted": 1,
    "block_published_before_it_is_computed": 5,
    "block_table_kept_on_preemption": 12,
    "blocks_freed_while_a_step_in_flight_uses_them": 0,
    "blocks_of_a_failed_request_stay_cached": 1,
    "blocks_of_drafts_not_sent": 16,
    "blocks_of_positions_without_rows_lost": 77_414,
    "bound_of_a_step_not_asked": 54,
    "bound_of_a_step_one_too_high": 54,
    "broken_image_fails_one_request_and_the_others_wait": 74,
    "broken_image_taken_for_an_empty_one": 14,
    "changed_files_not_noticed": 354,
    "chunk_after_an_image_reads_it_again": 74,
    "chunk_cuts_an_image_that_must_be_whole": 374,
    "collision_taken_for_the_same_content": 592,
    "complete_answer_goes_on": 19,
    "computed_tokens_not_reset_on_preemption": 13,
    "copy_of_a_failed_step_kept": 1_115,
    "differences_of_a_failed_step_lost": 3,
    "drafts_beyond_the_budget": 46,
    "drafts_beyond_the_end_of_the_answer": 2,
    "drafts_count_as_computed": 2,
    "drafts_of_a_withdrawn_row_accepted": 39,
    "each_prompt_with_images_gets_the_tokens_of_all": 9_114,
    "end_not_watched_for": 0,
    "ended_rows_decode_again": 2,
    "every_chunk_begins_at_the_first_row": 214,
    "every_sample_position_sees_the_whole_row": 2,
    "evicted_block_copied_a_step_late": 15,
    "executor_does_not_roll_back": 42,
    "failed_position_does_not_end_the_request": 12,
    "failed_row_sampled_all_the_same": 1,
    "finished_request_reported_twice": 0,
    "follower_that_left_is_queued_again": 360,
    "follower_waits_in_the_queue_too": 61,
    "followers_of_a_preempted_leader_wait": 260,
    "followers_wait_for_a_leader_that_is_gone": 61,
    "followers_wait_without_limit": 1_660,
    "fork_from_a_source_whose_prompt_is_not_computed": 8,
    "fork_shares_the_block_it_writes": 3,
    "fork_takes_the_state_where_it_stands": 15,
    "generated_tokens_lost_on_recompute": 15,
    "given_up_rows_never_encoded_again": 374,
    "grammar_does_not_go_back_with_a_dropped_token": 9_179,
    "grammar_that_fails_is_never_told": 79,
    "half_a_character_emitted": 7,
    "hash_hit_trusted_without_comparing_tokens": 7,
    "held_back_text_not_flushed": 7,
    "hit_ends_inside_an_entry": 15,
    "host_block_given_out_while_it_is_brought_back": 15,
    "host_copies_of_untrusted_content_kept": 1_115,
    "image_that_must_be_whole_waits_for_ever": 1_414,
    "images_lost_when_a_preempted_request_joins_again": 274,
    "images_of_the_row_before_kept": 74,
    "incomplete_entry_is_published": 24,
    "kv_of_the_token_to_come_published": 16,
    "lane_lost_when_its_head_is_preempted": 13,
    "largest_request_goes_first": 77,
    "last_row_of_a_tile_lost": 14,
    "last_token_of_a_withdrawn_row_taken_for_sampled": 39,
    "late_request_reported_twice": 2,
    "late_result_accepted": 5,
    "late_row_blocks_its_neighbours": 39,
    "late_row_never_rejoins": 39,
    "late_row_sampled_with_the_mask_of_an_earlier_token": 39,
    "late_row_sampled_without_a_mask": 39,
    "later_answers_of_a_prompt_do_not_wait": 374,
    "limit_of_a_tenant_ends_its_cheapest_request": 5_299,
    "line_for_memory_is_never_served": 54,
    "longest_answer_not_noticed": 2,
    "lost_blocks_begin_inside_an_image_that_must_be_whole": 319_732,
    "mask_goes_to_the_row_that_was_there_before": 39,
    "mask_ignores_tokens_in_flight": 219,
    "mask_made_before_the_newest_token_is_known": 39,
    "mask_of_an_aborted_row_goes_to_the_next_owner_of_its_slot": 279,
    "mask_of_the_last_sample_position_applied_to_the_whole_row": 7,
    "mask_of_the_neighbour_applied": 7,
    "masks_of_a_request_have_no_limit": 35_699,
    "matcher_followed_while_its_mask_is_made": 1_179,
    "new_entry_is_not_written_in_steady_decode": 15,
    "next_tile_waits_for_room_for_ever": 374,
    "nobody_waits_too_long_for_an_adapter": 3_594,
    "null_block_given_out": 0,
    "one_row_that_cannot_be_sampled_ends_the_whole_step": 185,
    "one_row_without_memory_ends_the_whole_step": 145,
    "one_too_few_accepted": 16,
    "only_chunks_have_adapters": 54,
    "only_the_first_image_of_a_prompt_read": 14,
    "other_samples_lost_when_the_first_ends": 2,
    "partial_block_cached": 5,
    "parts_of_a_failed_step_take_the_first_masks": 237,
    "parts_of_a_failed_step_take_the_first_sampling_parameters": 145,
    "placeholders_alone_identify_a_block": 1_374,
    "policy_told_twice_of_one_wait": 374,
    "position_of_a_withdrawn_row_counts_as_computed": 39,
    "preempted_request_goes_to_the_back": 18,
    "preempted_row_joins_before_its_mask_is_made": 279,
    "prefill_mode_loses_the_decode_rows_of_the_step": 1,
    "prefill_mode_never_returns_to_decodes": 13,
    "prefix_cache_does_not_know_adapters": 2_694,
    "prefix_cache_ignores_the_salt": 15,
    "prefix_hit_ends_inside_an_image_that_must_be_whole": 132,
    "prompts_go_by_size_only": 21,
    "prompts_go_in_policy_order_only": 122,
    "prompts_with_images_as_long_as_others_beside_decodes": 3_514,
    "put_back_leaks_blocks": 47,
    "ready_requests_told_only_once_all_are_encoded": 74,
    "rejected_positions_may_end_a_request": 2,
    "request_joins_before_its_grammar_is_compiled": 99,
    "request_joins_without_its_rows": 374,
    "request_larger_than_the_cache_admitted": 19,
    "request_ready_after_its_first_tile": 14,
    "requests_do_not_wait_for_their_adapter": 54,
    "requests_that_left_still_count": 54,
    "rest_of_the_size_share_is_lost": 83,
    "row_keeps_the_first_block_of_its_last_owner": 0,
    "row_keeps_the_sampling_settings_of_its_last_owner": 0,
    "row_stays_among_the_decodes": 2,
    "rows_dropped_while_another_request_uses_them": 74,
    "rows_given_up_and_still_referenced": 14,
    "rows_given_up_are_not_dropped": 14,
    "rows_in_memory_encoded_again": 374,
    "rows_of_earlier_requests_given_up": 574,
    "rows_shifted_by_one": 14,
    "rows_that_a_running_request_must_read_given_up": 374,
    "sample_positions_counted_from_the_first_chunk": 36,
    "sample_positions_off_by_one": 2,
    "saved_blocks_end_inside_an_image_that_must_be_whole": 141_714,
    "saved_kv_of_a_failed_row_is_kept": 21,
    "scheduler_sends_images_of_the_first_of_several_joined_rows": 314,
    "shared_block_not_counted": 3,
    "size_comes_before_priority": 349,
    "size_is_what_is_left": 133,
    "snapshot_of_a_later_position": 15,
    "snapshot_released_before_it_is_read": 15,
    "state_ahead_of_the_saved_position": 75,
    "state_not_cleared_when_a_request_begins": 4,
    "state_not_restored_by_a_swap": 15,
    "state_not_saved_by_a_swap": 15,
    "state_of_the_newest_block_is_read": 15,
    "token_behind_the_accepted_ones_not_stored": 2,
    "token_of_a_withdrawn_row_kept": 39,
    "token_of_the_first_sample_position_accepted": 42,
    "token_of_the_last_position_taken": 42,
    "token_that_the_grammar_refuses_is_delivered": 19,
    "tokens_behind_a_stop_kept": 16,
    "two_requests_use_one_state": 4,
    "unloading_does_not_drain": 54,
    "unused_rows_still_counted_after_they_are_used_again": 232,
    "verified_rows_never_decode_again": 2,
    "waiting_for_a_batch_never_ends": 0,
    "what_is_brought_back_counts_as_there": 15,
    "who_waits_for_an_adapter_stays_in_line_when_it_leaves": 1_794,
    "whole_prompt_taken_from_the_cache": 15,
    "window_forgets_one_position_too_early": 2,
    "window_left_behind_before_it_was_read": 2,
}
"""Bug -> seed of a world that notices it, where the search begins. It saves minutes."""


def check_some_world_finds(run_world: Callable[[int], object], most: int, first: Iterable[int] = ()) -> None:
    """Fail the test unless a world of the seeds ``first``, or one of the first ``most`` worlds, raises. A world takes
    its seed."""
    for seed in (*first, *range(most)):
        try:
            run_world(seed)
        except Exception:
            return
    pytest.fail(f"{most} worlds do not find the bug")


def check_is_found(name: str, plant: Plant, seeds: Iterable[int]) -> None:
    """Demand that a world of ``seeds``, or that of SEEN_AT, fails with the bug that ``plant`` injects, and holds
    without it."""
    with pytest.MonkeyPatch.context() as planted:
        plant(lambda owner, attribute, value: planted.setattr(owner, attribute, value))
        found = _first(seeds if name not in SEEN_AT else (SEEN_AT[name], *seeds))
    assert found is not None, f"no world noticed: {name}"
    assert not _fails(found), f"world {found} also fails without the planted bug"


def _first(seeds: Iterable[int]) -> int | None:
    return next((seed for seed in seeds if _fails(seed)), None)


def _fails(seed: int) -> bool:
    try:
        return failure_of(make_world(seed)) is not None
    except Exception:  # the engine's own checks may notice it after the last step
        return True


def _main() -> None:
    from tests.simulation import (
        test_adapter_mutants,
        test_draft_mutants,
        test_image_mutants,
        test_mask_mutants,
        test_mutants,
        test_prompt_mutants,
        test_state_mutants,
    )

    kinds: list[tuple[dict[str, Plant], Iterable[int]]] = [
        (test_mutants.MUTANTS, range(2_000)),
        (test_adapter_mutants.ADAPTER_MUTANTS, test_adapter_mutants.SEEDS),
        (test_draft_mutants.DRAFT_MUTANTS, test_draft_mutants.SEEDS),
        (test_image_mutants.IMAGE_MUTANTS, test_image_mutants.SEEDS),
        (test_mask_mutants.MASK_MUTANTS, test_mask_mutants.SEEDS),
        (test_prompt_mutants.PROMPT_MUTANTS, test_prompt_mutants.SEEDS),
        (test_state_mutants.STATE_MUTANTS, test_state_mutants.WORLDS),
    ]
    for table, seeds in kinds:
        for name, plant in sorted(table.items()):
            if pid := os.fork():
                os.waitpid(pid, 0)
                continue
            plant(setattr)
            print(f'    "{name}": {_first((*seeds, *range(500)))},', flush=True)
            os._exit(0)


if __name__ == "__main__":
    _main()
