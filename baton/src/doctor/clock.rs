//! Whether this machine's clock can be right. No lease hangs on it, but logs of several machines are read together.

use std::time::{Duration, UNIX_EPOCH};

use chassis::World;

use super::finding::Finding;

const GROUP: &str = "clock";
const ADVICE: &str = "synchronise it (chrony, systemd-timesyncd): requests go on, but logs and traces of several machines will not line up";

pub(super) fn look() -> Vec<Finding> {
    vec![plausible(World::real().unix_time(), built())]
}

/// When this executable was written: no clock that is right shows an earlier time.
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
                format!("it is at least {behind} s behind: before this executable was built"),
                ADVICE,
            )
        }
        _ => Finding::ok(GROUP, "not before this executable was built"),
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
