//! Checks whether this machine's clock is plausible. Leases do not depend on the clock, but logs of several
//! machines are compared by time.

use std::time::{Duration, UNIX_EPOCH};

use chassis::World;

use super::finding::Finding;

const GROUP: &str = "clock";
const ADVICE: &str = "synchronise it (chrony, systemd-timesyncd): requests still work, but logs and traces of several machines cannot be compared";

pub(super) fn look() -> Vec<Finding> {
    vec![plausible(World::real().unix_time(), built())]
}

/// Returns the modification time of this executable. A correct clock shows no earlier time.
fn built() -> Option<Duration> {
    let written = std::env::current_exe().ok()?.metadata().ok()?.modified().ok()?;
    written.duration_since(UNIX_EPOCH).ok()
}

fn plausible(now: Duration, built: Option<Duration>) -> Finding {
    match built {
        Some(built) if now < built => {
            let behind = (built - now).as_secs();
            Finding::warn(
                GROUP,
                format!(
                    "the clock is at least {behind} s behind: it shows a time before this executable was built"
                ),
                ADVICE,
            )
        }
        _ => Finding::ok(GROUP, "the time is after the build of this executable"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    #[test]
    fn a_clock_from_before_the_build_is_wrong() {
        let built = Some(Duration::from_secs(1_000_000));
        assert_eq!(plausible(Duration::from_secs(999_000), built).level, Level::Warn);
        assert_eq!(plausible(Duration::from_secs(1_000_001), built).level, Level::Ok);
        assert_eq!(plausible(Duration::from_secs(1), None).level, Level::Ok);
    }
}
