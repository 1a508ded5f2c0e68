//! Amounts of memory with binary units: `4GiB`, `512MiB`, `65536`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A number of bytes in a configuration file: an integer, or a string with a binary unit.
///
/// Decimal units are refused. Memory comes in powers of two, and a `4GB` that one reader takes for 4 GiB and another for
/// 4·10⁹ bytes is a mistake that shows late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Binary units, the largest first, so that `Display` finds the shortest exact form.
const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl FromStr for ByteSize {
    type Err = NotBytes;

    fn from_str(text: &str) -> Result<Self, NotBytes> {
        let refusal = || NotBytes(text.to_owned());
        let unit_start = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(unit_start);
        let factor = match unit.trim() {
            "" | "B" => 1,
            unit => UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(refusal)?.1,
        };
        let count: u64 = digits.parse().map_err(|_| refusal())?;
        count.checked_mul(factor).map(Self).ok_or_else(refusal)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor)) {
            Some((name, factor)) => write!(f, "{}{name}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ByteSizeVisitor)
    }
}

struct ByteSizeVisitor;

impl de::Visitor<'_> for ByteSizeVisitor {
    type Value = ByteSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes, such as 65536 or \"4GiB\"")
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
        Ok(ByteSize(bytes))
    }

    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
        u64::try_from(bytes).map(ByteSize).map_err(|_| E::invalid_value(de::Unexpected::Signed(bytes), &self))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
        text.parse().map_err(E::custom)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a number of bytes: write 65536, 64KiB, 512MiB, 4GiB or 1TiB")]
pub struct NotBytes(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_sizes_table() {
        for (text, bytes, shown) in [
            ("0", 0, "0"),
            ("1000", 1000, "1000"),
            ("17B", 17, "17"),
            ("65536", 65536, "64KiB"),
            ("512 MiB", 512 << 20, "512MiB"),
            ("4GiB", 4 << 30, "4GiB"),
            ("1536MiB", 1536 << 20, "1536MiB"),
            ("1TiB", 1 << 40, "1TiB"),
        ] {
            let size: ByteSize = text.parse().expect(text);
            assert_eq!((size.0, size.to_string().as_str()), (bytes, shown), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in ["", "GiB", "4GB", "4gib", "-1", "1.5GiB", "99999999TiB"] {
            text.parse::<ByteSize>().expect_err(text);
        }
    }
}
