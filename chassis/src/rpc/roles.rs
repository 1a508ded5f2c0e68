//! The roles that may make each call between Baton's processes.

use crate::identity::call::CallRefused;
use crate::identity::{CertName, CertRole};

use CertRole::{Both, Decode, Operator, Pool, Prefill, Router};

/// The calls by the beginning of their path, and their callers. The first line that fits decides; other calls have no
/// caller.
const CALLERS: [(&str, &[CertRole]); 9] = [
    ("/baton.v1.Prefill/", &[Router]),
    ("/baton.v1.Decode/", &[Router, Operator]),
    ("/baton.v1.Pool/", &[Router]),
    ("/baton.v1.NodeStatus/SetStanding", &[Router]),
    ("/baton.v1.NodeStatus/ChangeRole", &[Router]),
    ("/baton.v1.NodeStatus/", &[Router, Operator]),
    ("/baton.v1.Bootstrap/Watch", &[Router, Prefill, Decode, Both, Pool, Operator]),
    ("/baton.v1.Bootstrap/Announce", &[Prefill, Decode, Both, Pool]),
    ("/baton.v1.Bootstrap/", &[Router, Prefill, Decode, Both, Pool]),
];

/// Refuses a caller without a certificate, or of a role that does not make this call.
pub(super) fn check(path: &str, caller: Option<&CertName>) -> Result<(), CallRefused> {
    let caller = caller.ok_or(CallRefused::NoCertificate)?;
    let line = CALLERS.iter().find(|(call, _)| path.starts_with(call));
    match line {
        Some((_, roles)) if roles.contains(&caller.role) => Ok(()),
        _ => Err(CallRefused::Role { caller: caller.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_table() {
        for (path, allowed) in [
            ("/baton.v1.Prefill/Run", "router"),
            ("/baton.v1.Prefill/Deliver", "router"),
            ("/baton.v1.Decode/Run", "router operator"),
            ("/baton.v1.Pool/Put", "router"),
            ("/baton.v1.Pool/Deliver", "router"),
            ("/baton.v1.NodeStatus/SetStanding", "router"),
            ("/baton.v1.NodeStatus/ChangeRole", "router"),
            ("/baton.v1.NodeStatus/Watch", "router operator"),
            ("/baton.v1.NodeStatus/Ledger", "router operator"),
            ("/baton.v1.Bootstrap/Announce", "prefill decode both pool"),
            ("/baton.v1.Bootstrap/KeepAlive", "router prefill decode both pool"),
            ("/baton.v1.Bootstrap/Lock", "router prefill decode both pool"),
            ("/baton.v1.Bootstrap/Withdraw", "router prefill decode both pool"),
            ("/baton.v1.Bootstrap/Watch", "router prefill decode both pool operator"),
            ("/baton.v1.Unknown/Call", ""),
        ] {
            for role in CertRole::ALL {
                let caller = CertName::parse(&format!("baton://c/{}/n", role.as_str())).expect("a name");
                let is_allowed = allowed.split(' ').any(|one| one == role.as_str());
                let expected =
                    if is_allowed { Ok(()) } else { Err(CallRefused::Role { caller: caller.clone() }) };
                assert_eq!(check(path, Some(&caller)), expected, "{path} by {}", role.as_str());
            }
            assert_eq!(check(path, None), Err(CallRefused::NoCertificate), "{path}");
        }
    }
}
