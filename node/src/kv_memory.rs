//! The size of a node's KV memory: a number of bytes, a percentage of free memory at the start, or a default
//! for the model.

use std::fmt;
use std::num::NonZero;
use std::str::FromStr;

use chassis::byte_size::ByteSize;
pub use device::memory::available::available_bytes;
use engine::{AutoRoom, KvRoom};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The `model.kv_memory` setting of a node that computes: `"auto"`, `"auto/2"`, or a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKvMemory {
    /// A default size for the model, on a device that `nodes` nodes share.
    Auto {
        nodes: NonZero<u16>,
    },
    Size(KvMemorySize),
}

/// The percentage of free host memory that `auto` takes at most. Nodes that share a device divide the memory.
const AUTO_HOST_PERCENT: u64 = 40;
const AUTO_GPU_PERCENT: usize = 90;
/// The host memory that `auto` assumes as its limit if the free memory is unknown.
const AUTO_UNKNOWN_BYTES: u64 = 1 << 30;

impl ModelKvMemory {
    /// Converts the setting to an amount of memory, by the memory that is free now.
    pub fn room(self) -> Result<KvRoom, UnknownMemory> {
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        Ok(match self {
            Self::Size(KvMemorySize::Bytes(ByteSize(amount))) => KvRoom::Bytes(bytes(amount)),
            Self::Size(share @ KvMemorySize::Percent(_)) => KvRoom::OnHost(bytes(share.bytes()?)),
            Self::Auto { nodes } => {
                let host =
                    available_bytes().map_or(AUTO_UNKNOWN_BYTES, |free| free / 100 * AUTO_HOST_PERCENT);
                KvRoom::Auto(AutoRoom {
                    host_bytes: bytes(host / u64::from(nodes.get())),
                    gpu_percent: AUTO_GPU_PERCENT / usize::from(nodes.get()),
                })
            }
        })
    }
}

/// A size of memory: `"4GiB"`, a number of bytes, or `"60%"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvMemorySize {
    Bytes(ByteSize),
    /// The percentage of the memory that is available to this process at its start, from 1 to 95.
    Percent(u8),
}

/// The error of a text that is no amount of memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not an amount of memory: use \"4GiB\", a number of bytes, or a share of free memory from \"1%\" to \"95%\""
)]
pub struct NotMemory(String);

/// The error of a text that is neither an amount of memory nor `auto`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; or \"auto\" for a default size, or \"auto/2\" if two nodes share the device")]
pub struct NotModelMemory(NotMemory);

/// The error of a percentage on a machine that does not report its free memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("/proc/meminfo does not say how much memory is free: give an amount")]
pub struct UnknownMemory;

impl KvMemorySize {
    /// Returns the size in bytes, for the memory that is free now.
    pub fn bytes(self) -> Result<u64, UnknownMemory> {
        match self {
            Self::Bytes(ByteSize(bytes)) => Ok(bytes),
            Self::Percent(percent) => Ok(available_bytes().ok_or(UnknownMemory)? / 100 * u64::from(percent)),
        }
    }
}

impl FromStr for KvMemorySize {
    type Err = NotMemory;

    fn from_str(text: &str) -> Result<Self, NotMemory> {
        let refusal = || NotMemory(text.to_owned());
        match text.strip_suffix('%') {
            None => text.parse().map(Self::Bytes).map_err(|_| refusal()),
            Some(percent) => match percent.trim().parse() {
                Ok(percent @ 1..=95) => Ok(Self::Percent(percent)),
                _ => Err(refusal()),
            },
        }
    }
}

impl fmt::Display for KvMemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{bytes}"),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

impl FromStr for ModelKvMemory {
    type Err = NotModelMemory;

    fn from_str(text: &str) -> Result<Self, NotModelMemory> {
        let nodes = match text.strip_prefix("auto") {
            Some("") => Some(NonZero::<u16>::MIN),
            Some(sharers) => sharers.strip_prefix('/').and_then(|nodes| nodes.parse().ok()),
            None => None,
        };
        match nodes {
            Some(nodes) => Ok(Self::Auto { nodes }),
            None => text.parse().map(Self::Size).map_err(NotModelMemory),
        }
    }
}

impl fmt::Display for ModelKvMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto { nodes } if nodes.get() == 1 => write!(f, "auto"),
            Self::Auto { nodes } => write!(f, "auto/{nodes}"),
            Self::Size(size) => write!(f, "{size}"),
        }
    }
}

impl Serialize for KvMemorySize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for ModelKvMemory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The setting as it is written in a file: a number or a text.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected an amount of memory: \"4GiB\", a number of bytes, or a share such as \"60%\""
)]
enum RawKvMemory {
    Bytes(u64),
    Text(String),
}

impl<'de> Deserialize<'de> for KvMemorySize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match RawKvMemory::deserialize(deserializer)? {
            RawKvMemory::Bytes(bytes) => Ok(Self::Bytes(ByteSize(bytes))),
            RawKvMemory::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

impl<'de> Deserialize<'de> for ModelKvMemory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match RawKvMemory::deserialize(deserializer)? {
            RawKvMemory::Bytes(bytes) => Ok(Self::Size(KvMemorySize::Bytes(ByteSize(bytes)))),
            RawKvMemory::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_and_shares_are_read_as_they_are_written() {
        for (text, size) in [
            ("4GiB", KvMemorySize::Bytes(ByteSize(4 << 30))),
            ("60%", KvMemorySize::Percent(60)),
            ("1%", KvMemorySize::Percent(1)),
        ] {
            assert_eq!(text.parse(), Ok(size));
            assert_eq!(size.to_string(), text);
        }
        for text in ["0%", "96%", "300%", "-1%", "%", "much", "4 GB"] {
            let error = text.parse::<KvMemorySize>().expect_err(text).to_string();
            assert!(error.starts_with(&format!("{text:?} is not an amount of memory")), "{error}");
        }
    }

    #[test]
    fn what_suits_the_model_is_shared_by_those_on_its_device() {
        let auto = |nodes| ModelKvMemory::Auto { nodes: NonZero::new(nodes).expect("some") };
        for (text, memory) in
            [("auto", auto(1)), ("auto/2", auto(2)), ("60%", ModelKvMemory::Size(KvMemorySize::Percent(60)))]
        {
            assert_eq!(text.parse(), Ok(memory));
            assert_eq!(memory.to_string(), text);
        }
        for text in ["auto/0", "auto/", "auto2", "automatic", "auto/99999"] {
            let error = text.parse::<ModelKvMemory>().expect_err(text).to_string();
            assert!(
                error.starts_with(&format!("{text:?} is not an amount")) && error.contains("auto/2"),
                "{error}"
            );
        }
        let rooms = [1, 3].map(|nodes| auto(nodes).room().expect("this machine says"));
        let [KvRoom::Auto(alone), KvRoom::Auto(third)] = rooms else { panic!("{rooms:?}") };
        assert_eq!((alone.gpu_percent, third.gpu_percent), (90, 30));
        assert!(third.host_bytes > 0 && third.host_bytes < alone.host_bytes / 2);
    }

    #[test]
    fn a_share_is_of_what_is_free_now() {
        let half = KvMemorySize::Percent(50).bytes().expect("this machine says");
        let most = KvMemorySize::Percent(95).bytes().expect("this machine says");
        assert!(half > 0 && half < most);
    }
}
