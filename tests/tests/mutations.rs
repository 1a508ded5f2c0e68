//! The simulation without one of its guards must fail. `docs/simulation.md` has the table.
#![cfg(feature = "mutations")]

use baton_tests::sim::{Report, group, run};
use chassis::guards::{Guard, remove};

/// The number of seeds within which a missing guard must be noticed.
const SEEDS: u64 = 400;
/// The number of seeds for a guard that few plans need.
const MANY_SEEDS: u64 = 2_000;

/// Returns the first seed at which the simulation fails without `guard`, with the failure's message.
fn noticed(guard: Guard, run: fn(u64) -> Report) -> Option<(u64, String)> {
    let _removed = remove(guard);
    let first: u64 = std::env::var("FIRST").map_or(0, |text| text.parse().expect("a number"));
    (first..first + n_seeds(guard))
        .find_map(|seed| run(seed).faults.first().map(|fault| (seed, fault.clone())))
}

fn n_seeds(guard: Guard) -> u64 {
    if guard == Guard::AllAccepted { MANY_SEEDS } else { SEEDS }
}

fn check(guard: Guard, run: fn(u64) -> Report) {
    let (seed, fault) =
        noticed(guard, run).unwrap_or_else(|| panic!("{} seeds run well without {guard:?}", n_seeds(guard)));
    eprintln!("{guard:?}: seed {seed}: {fault}");
}

macro_rules! guards {
    ($run:path: $($test:ident => $guard:ident,)*) => {
        $(#[test] fn $test() { check(Guard::$guard, $run); })*
    };
}

guards! { run:
    a_missing_grant_check_is_noticed => Grant,
    a_missing_epoch_check_is_noticed => Epoch,
    endless_attempts_are_noticed => AttemptBudget,
    a_missing_deadline_reaper_is_noticed => DeadlineReaper,
    leases_that_never_expire_are_noticed => LeaseExpiry,
    a_missing_resync_is_noticed => Resync,
    writing_after_the_end_is_noticed => Quiet,
    a_missing_ticket_is_noticed => LineTicket,
    a_double_admission_is_noticed => Admission,
    a_lost_assignment_is_noticed => Assignment,
    a_missing_growth_reserve_is_noticed => GrowthReserve,
    a_prompt_that_is_cached_whole_and_hangs_is_noticed => LastToken,
}

guards! { group::landings::run:
    a_sender_that_does_not_wait_for_all_processes_is_noticed => AllAccepted,
    a_landing_without_the_pages_of_a_process_is_noticed => AllLanded,
    blocks_that_return_while_a_process_may_write_are_noticed => AllQuiet,
}

guards! { group::run:
    a_message_that_is_not_the_next_one_is_noticed => MessageNumber,
}
