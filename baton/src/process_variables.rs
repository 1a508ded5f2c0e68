//! Decides which processes of `baton up` get a variable `BATON_EXPERT__…` or `BATON_MODEL__…`: those that have a
//! setting for it.

use node::RawNodeConfig;
use pool_node::RawPoolConfig;
use router::RawRouterConfig;
use types::Role;

/// The sections that several kinds of processes have, each with settings of its own.
const SHARED_SECTIONS: [&str; 2] = ["BATON_EXPERT__", "BATON_MODEL__"];

/// Returns whether the router gets the variable. The router also gets unknown variables, and refuses them.
pub(crate) fn is_for_router(variable: &str) -> bool {
    is_shared(variable) && (of_router(variable) || !(of_node(variable) || of_pool(variable)))
}

/// Returns whether the variable is a setting of other processes than a node of this role.
pub(crate) fn is_for_others(role: Role, variable: &str) -> bool {
    let is_own = match role {
        Role::Pool => of_pool(variable),
        Role::Prefill | Role::Decode | Role::Both => of_node(variable),
    };
    is_shared(variable) && !is_own && (of_router(variable) || of_node(variable) || of_pool(variable))
}

fn is_shared(variable: &str) -> bool {
    SHARED_SECTIONS.iter().any(|section| variable.starts_with(section))
}

fn of_router(variable: &str) -> bool {
    chassis::config::has_setting::<RawRouterConfig>(variable)
}

fn of_node(variable: &str) -> bool {
    chassis::config::has_setting::<RawNodeConfig>(variable)
}

fn of_pool(variable: &str) -> bool {
    chassis::config::has_setting::<RawPoolConfig>(variable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_takes_the_expert_settings_that_it_has() {
        // Each case: the variable, and whether the router, a prefill node and a pool node get it.
        for (variable, router, node, pool) in [
            ("BATON_EXPERT__LOG__SPANS", true, true, true),
            ("BATON_EXPERT__ROUTER__STUCK_MS", true, false, false),
            ("BATON_EXPERT__SCHEDULER__SEQUENCES_MAX", false, true, false),
            ("BATON_EXPERT__TRANSFER__STREAMS", false, true, true),
            ("BATON_EXPERT__TRANSFER__STREAM", true, true, true),
            ("BATON_MODEL__TOOL_FORMAT", true, false, false),
            ("BATON_MODEL__KV_MEMORY", false, true, false),
            ("BATON_MODEL__NAME", true, true, false),
        ] {
            assert_eq!(is_for_router(variable), router, "{variable}");
            assert_eq!(!is_for_others(Role::Prefill, variable), node, "{variable}");
            assert_eq!(!is_for_others(Role::Pool, variable), pool, "{variable}");
        }
        assert!(!is_for_router("BATON_NODE__ID") && !is_for_others(Role::Decode, "BATON_ROUTER__HTTP"));
    }
}
