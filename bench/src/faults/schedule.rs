//! A schedule of faults, read from TOML.
//!
//! ```toml
//! [[fault]]
//! at = "20s"
//! do = "stop"          # kill, stop, cont, restart or run
//! role = "decode"      # found through the router's /debug/cluster; or pid = 4711
//! which = 0            # the first of that role
//! victim = "d0"        # remembered under this name
//!
//! [[fault]]
//! at = "30s"
//! do = "cont"
//! victim = "d0"        # the same process, though the cluster may have forgotten it
//! ```

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use crate::error::{BenchError, Result, read_text};
use crate::span::parse_span;

/// The faults of a schedule, in the order of their times.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    pub faults: Vec<Fault>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// The time of the fault after the start of the load.
    pub at: Duration,
    pub action: FaultAction,
}

#[derive(Clone, Debug, PartialEq)]
pub enum FaultAction {
    /// Send SIGKILL.
    Kill(Victim),
    /// Send SIGSTOP: the process exists but does not run.
    Stop(Victim),
    /// Send SIGCONT.
    Cont(Victim),
    /// Send SIGKILL, and then run the command that starts the process again.
    Restart(Victim, Vec<String>),
    /// Run a command, which for example partitions the network or slows a disk.
    Run(Vec<String>),
}

/// The process that a fault affects.
#[derive(Clone, Debug, PartialEq)]
pub struct Victim {
    pub choice: Choice,
    /// The name under which later faults refer to this process.
    pub name: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Choice {
    Pid(i32),
    /// The node at position `which` among those of a role, in the order of ids.
    Role {
        role: String,
        which: usize,
    },
    /// The process of an earlier fault, by the name of the victim.
    Remembered,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSchedule {
    #[serde(default)]
    fault: Vec<RawFault>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFault {
    at: String,
    #[serde(rename = "do")]
    action: String,
    pid: Option<i32>,
    role: Option<String>,
    #[serde(default)]
    which: usize,
    victim: Option<String>,
    #[serde(default)]
    command: Vec<String>,
}

impl Schedule {
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(&read_text(path)?).map_err(|reason| BenchError::parse(path, reason))
    }

    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let raw: RawSchedule = toml::from_str(text).map_err(|error| error.to_string())?;
        let mut faults: Vec<_> =
            raw.fault.into_iter().map(Fault::from_raw).collect::<std::result::Result<_, _>>()?;
        faults.sort_by_key(|fault| fault.at);
        if faults.is_empty() {
            Err("a schedule has at least one [[fault]]".to_owned())
        } else {
            Ok(Self { faults })
        }
    }
}

impl Fault {
    fn from_raw(raw: RawFault) -> std::result::Result<Self, String> {
        let at = parse_span(&raw.at)?;
        let needs_command = matches!(raw.action.as_str(), "restart" | "run");
        if needs_command == raw.command.is_empty() {
            return Err(format!("fault at {}: restart and run have a command, the others have none", raw.at));
        }
        let action = match raw.action.as_str() {
            "kill" => FaultAction::Kill(raw.victim()?),
            "stop" => FaultAction::Stop(raw.victim()?),
            "cont" => FaultAction::Cont(raw.victim()?),
            "restart" => FaultAction::Restart(raw.victim()?, raw.command),
            "run" => FaultAction::Run(raw.command),
            other => {
                return Err(format!(
                    "fault at {}: `{other}` is none of kill, stop, cont, restart, run",
                    raw.at
                ));
            }
        };
        Ok(Self { at, action })
    }
}

impl RawFault {
    fn victim(&self) -> std::result::Result<Victim, String> {
        let choice = match (self.pid, &self.role, &self.victim) {
            (Some(pid), None, _) if pid > 1 => Choice::Pid(pid),
            (None, Some(role), _) => Choice::Role { role: role.clone(), which: self.which },
            (None, None, Some(_)) => Choice::Remembered,
            _ => return Err(format!("fault at {}: give pid, or role, or an earlier victim", self.at)),
        };
        Ok(Victim { choice, name: self.victim.clone() })
    }
}

impl FaultAction {
    /// Returns the fault's text for the timeline of a report.
    pub fn name(&self) -> String {
        let of = |verb: &str, victim: &Victim| match &victim.choice {
            Choice::Pid(pid) => format!("{verb} {pid}"),
            Choice::Role { role, which } => format!("{verb} {role} {which}"),
            Choice::Remembered => format!("{verb} {}", victim.name.as_deref().unwrap_or("")),
        };
        match self {
            FaultAction::Kill(victim) => of("kill", victim),
            FaultAction::Stop(victim) => of("stop", victim),
            FaultAction::Cont(victim) => of("cont", victim),
            FaultAction::Restart(victim, _) => of("restart", victim),
            FaultAction::Run(command) => format!("run {}", command[0]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_is_read_in_the_order_of_time() {
        let text = r#"
            [[fault]]
            at = "30s"
            do = "cont"
            victim = "d0"
            [[fault]]
            at = "20s"
            do = "stop"
            role = "decode"
            victim = "d0"
            [[fault]]
            at = "40s"
            do = "restart"
            pid = 4711
            command = ["baton", "prefill"]
        "#;
        let schedule = Schedule::parse(text).expect("sound");
        let names: Vec<_> =
            schedule.faults.iter().map(|fault| (fault.at.as_secs(), fault.action.name())).collect();
        let expected = [(20, "stop decode 0"), (30, "cont d0"), (40, "restart 4711")];
        assert_eq!(names, expected.map(|(at, name)| (at, name.to_owned())));
    }

    #[test]
    fn a_wrong_schedule_is_refused_with_the_reason() {
        let check = |text: &str, reason: &str| {
            let error = Schedule::parse(text).expect_err(text);
            assert!(error.contains(reason), "{error}");
        };
        check("", "at least one");
        check("[[fault]]\nat = \"1s\"\ndo = \"kill\"", "give pid");
        check("[[fault]]\nat = \"1s\"\ndo = \"kill\"\npid = 1", "give pid");
        check("[[fault]]\nat = \"1s\"\ndo = \"maim\"\npid = 9", "none of");
        check("[[fault]]\nat = \"1s\"\ndo = \"restart\"\npid = 9", "have a command");
        check("[[fault]]\nat = \"1s\"\ndo = \"kill\"\nprocess = 9", "unknown field");
    }
}
