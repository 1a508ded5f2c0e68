//! Distributions of prompt and answer lengths.

use std::fmt;
use std::str::FromStr;

use crate::random::Random;

/// The longest prompt or answer in tokens.
const N_TOKENS_MAX: f64 = 10_000_000.0;

/// A distribution of token counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    Fixed(u32),
    /// Every length from the first to the second number, both included, is equally likely.
    Uniform(u32, u32),
    /// Lengths as in real prompts: `median`, and `sigma`, the standard deviation of the logarithm.
    LogNormal {
        median: f64,
        sigma: f64,
    },
}

impl Lengths {
    /// Draws a length of at least one token.
    pub fn draw(&self, random: &mut Random) -> u32 {
        match *self {
            Lengths::Fixed(n) => n,
            Lengths::Uniform(low, high) => low + random.below(u64::from(high - low) + 1) as u32,
            Lengths::LogNormal { median, sigma } => {
                (median * (sigma * random.normal()).exp()).round().clamp(1.0, N_TOKENS_MAX) as u32
            }
        }
    }
}

impl FromStr for Lengths {
    type Err = String;

    /// Parses `1024`, `uniform:512..2048` or `lognormal:1024,0.6`.
    fn from_str(text: &str) -> Result<Self, String> {
        let lengths = match text.split_once(':') {
            None => text.parse().ok().map(Lengths::Fixed),
            Some(("uniform", range)) => pair(range, "..").map(|(low, high)| Lengths::Uniform(low, high)),
            Some(("lognormal", pair_text)) => {
                pair(pair_text, ",").map(|(median, sigma)| Lengths::LogNormal { median, sigma })
            }
            Some(_) => None,
        };
        lengths
            .filter(Lengths::is_sound)
            .ok_or_else(|| format!("`{text}` is none of 1024, uniform:512..2048, lognormal:MEDIAN,SIGMA"))
    }
}

impl Lengths {
    fn is_sound(&self) -> bool {
        match *self {
            Lengths::Fixed(n) => n > 0,
            Lengths::Uniform(low, high) => 0 < low && low <= high,
            Lengths::LogNormal { median, sigma } => median >= 1.0 && sigma >= 0.0,
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lengths::Fixed(n) => write!(f, "{n}"),
            Lengths::Uniform(low, high) => write!(f, "uniform:{low}..{high}"),
            Lengths::LogNormal { median, sigma } => write!(f, "lognormal:{median},{sigma}"),
        }
    }
}

fn pair<A: FromStr, B: FromStr>(text: &str, between: &str) -> Option<(A, B)> {
    let (first, second) = text.split_once(between)?;
    Some((first.trim().parse().ok()?, second.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_read_and_shown() {
        for text in ["1024", "uniform:512..2048", "lognormal:1024,0.6"] {
            let lengths: Lengths = text.parse().expect(text);
            assert_eq!(lengths.to_string(), text);
        }
        for text in ["0", "uniform:9..3", "uniform:0..3", "normal:3", "lognormal:0.2,1", "x"] {
            assert!(text.parse::<Lengths>().is_err(), "{text}");
        }
    }

    #[test]
    fn draws_stay_in_range_and_have_their_middle() {
        let mut random = Random::stream(1, 0);
        let mut draws: Vec<u32> = (0..20_001).map(|_| Lengths::Uniform(10, 20).draw(&mut random)).collect();
        assert!(draws.iter().all(|n| (10..=20).contains(n)) && draws.contains(&10) && draws.contains(&20));
        draws =
            (0..20_001).map(|_| Lengths::LogNormal { median: 500.0, sigma: 0.8 }.draw(&mut random)).collect();
        draws.sort_unstable();
        assert!((480..520).contains(&draws[10_000]), "median {}", draws[10_000]);
        assert!((1050..1200).contains(&draws[16_827]), "one deviation up is {}", draws[16_827]);
    }
}
