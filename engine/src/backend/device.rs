//! The device that computes: the CPU, or one of the machine's GPUs.

use std::fmt;
use std::str::FromStr;

/// The device to compute on, written as `auto`, `cpu`, `cuda` or `cuda:1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Device {
    /// The first usable GPU, else the CPU.
    #[default]
    Auto,
    Cpu,
    /// The GPU with this number, in the driver's order.
    Cuda(usize),
}

/// The error for a text that does not name a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device: use auto, cpu, cuda or cuda:N with the number of a GPU")]
pub struct UnknownDevice(String);

impl FromStr for Device {
    type Err = UnknownDevice;

    fn from_str(word: &str) -> Result<Self, UnknownDevice> {
        let unknown = || UnknownDevice(word.to_owned());
        match word.split_once(':') {
            None if word == "auto" => Ok(Self::Auto),
            None if word == "cpu" => Ok(Self::Cpu),
            None if word == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", number)) => number.parse().map(Self::Cuda).map_err(|_| unknown()),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_read_as_it_is_written() {
        for (word, device) in [
            ("auto", Device::Auto),
            ("cpu", Device::Cpu),
            ("cuda:0", Device::Cuda(0)),
            ("cuda:3", Device::Cuda(3)),
        ] {
            assert_eq!(word.parse(), Ok(device));
            assert_eq!(device.to_string(), word);
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        for word in ["gpu", "cuda:", "cuda:x", "cpu:0", ""] {
            let error = word.parse::<Device>().expect_err(word).to_string();
            assert!(error.starts_with(&format!("{word:?} is not a device")), "{error}");
        }
    }
}
