//! The beginning of a GGUF file: its metadata, and the type, shape and place of each tensor.
//!
//! ```text
//! "GGUF", version (u32), number of tensors (u64), number of keys (u64)      all numbers little-endian
//! keys       name, type (u32), value                                        a text: its length (u64), its bytes
//! tensors    name, number of dimensions (u32), dimensions (u64), type (u32), offset (u64)
//! data       at the next multiple of the alignment; offsets count from here
//! ```
//!
//! Every count is compared with a limit or with the bytes that are left before anything is allocated for it.

use std::collections::BTreeMap;
use std::ops::Range;

use kernels::cpu::Format;

use super::blocks::StoredAs;

const MAGIC: &[u8; 4] = b"GGUF";
/// The versions that are read. Version 3 is version 2 with a big-endian form, which begins with other bytes. Version 1 has
/// shorter counts, and no program has written it since 2023.
const VERSIONS: [u32; 2] = [2, 3];
/// The most values in all keys together: a vocabulary of 256k tokens has about a million.
const VALUES_MAX: usize = 1 << 22;
/// The most tensors: the largest models have a few thousand.
const TENSORS_MAX: u64 = 1 << 18;
const NAME_BYTES_MAX: usize = 1 << 10;
const DIMENSIONS_MAX: u32 = 4;
const ALIGNMENT: u64 = 32;

/// The metadata and the list of tensors at the beginning of a file.
#[derive(Debug)]
pub(super) struct Header<'a> {
    file: &'a [u8],
    keys: BTreeMap<&'a str, Value<'a>>,
    pub(super) tensors: Vec<TensorInfo<'a>>,
    /// The position of the tensors' data in the file.
    pub(super) data_start: usize,
}

/// The value of a key.
#[derive(Debug)]
pub(super) enum Value<'a> {
    Whole(u64),
    Negative(i64),
    Real(f64),
    Bool(bool),
    Text(&'a str),
    List(Vec<Value<'a>>),
}

/// A tensor as the file describes it.
#[derive(Debug)]
pub(super) struct TensorInfo<'a> {
    pub(super) name: &'a str,
    /// The largest dimension in memory comes first, as in safetensors: the number of columns is last.
    pub(super) shape: Vec<usize>,
    pub(super) stored_as: StoredAs,
    /// The place of its bytes in the data.
    pub(super) bytes: Range<usize>,
}

impl<'a> Header<'a> {
    pub(super) fn parse(file: &'a [u8]) -> Result<Self, String> {
        let mut reader = Reader { file, at: 0, values_left: VALUES_MAX };
        if reader.take(MAGIC.len())? != MAGIC {
            return Err("it does not begin with GGUF".to_owned());
        }
        let version = reader.u32()?;
        if !VERSIONS.contains(&version) {
            return Err(format!("version {version} is not supported: 2 and 3 are"));
        }
        let (n_tensors, n_keys) = (reader.u64()?, reader.u64()?);
        if n_tensors > TENSORS_MAX || n_keys > VALUES_MAX as u64 {
            return Err(format!("{n_tensors} tensors and {n_keys} keys are too many"));
        }
        let mut keys = BTreeMap::new();
        for nth in 0..n_keys {
            let name = reader.name().map_err(|wrong| format!("key {nth} of {n_keys}: {wrong}"))?;
            let value = reader.value().map_err(|wrong| format!("key {name}: {wrong}"))?;
            if keys.insert(name, value).is_some() {
                return Err(format!("key {name} is there twice"));
            }
        }
        let mut header = Self { file, keys, tensors: Vec::new(), data_start: 0 };
        let alignment = header.count_or("general.alignment", ALIGNMENT)?;
        if !alignment.is_power_of_two() || alignment < 8 {
            return Err(format!("general.alignment is {alignment}"));
        }
        for nth in 0..n_tensors {
            let name = reader.name().map_err(|wrong| format!("tensor {nth} of {n_tensors}: {wrong}"))?;
            let tensor = reader.tensor(name, alignment).map_err(|wrong| format!("tensor {name} {wrong}"))?;
            header.tensors.push(tensor);
        }
        header.data_start = reader.at.checked_next_multiple_of(alignment as usize).unwrap_or(usize::MAX);
        header.check_tensors(file.len().saturating_sub(header.data_start))?;
        Ok(header)
    }

    fn check_tensors(&self, data_bytes: usize) -> Result<(), String> {
        let mut names: Vec<&str> = self.tensors.iter().map(|tensor| tensor.name).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|two| two[0] == two[1]) {
            return Err(format!("tensor {} is there twice", twice[0]));
        }
        match self.tensors.iter().find(|tensor| tensor.bytes.end > data_bytes) {
            Some(TensorInfo { name, bytes, .. }) => Err(format!(
                "tensor {name} ends at byte {} of the data, and the file has {data_bytes}",
                bytes.end
            )),
            None => Ok(()),
        }
    }

    /// Returns the tensor's numbers, if there is one of this name in F32.
    pub(super) fn f32s(&self, tensor: &str) -> Option<Vec<f32>> {
        let info = self.tensors.iter().find(|info| info.name == tensor)?;
        let numbers = self.file[self.data_start..][info.bytes.clone()].as_chunks().0;
        (info.stored_as == StoredAs::Plain(Format::F32))
            .then(|| numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.keys.keys().copied()
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, String> {
        self.typed(key, "a text", |value| if let Value::Text(text) = value { Some(*text) } else { None })
    }

    pub(super) fn count(&self, key: &str) -> Result<Option<u64>, String> {
        self.typed(key, "a count", Value::count)
    }

    pub(super) fn count_or(&self, key: &str, default: u64) -> Result<u64, String> {
        Ok(self.count(key)?.unwrap_or(default))
    }

    pub(super) fn needed_count(&self, key: &str) -> Result<u64, String> {
        self.count(key)?.ok_or_else(|| format!("there is no key {key}"))
    }

    pub(super) fn real(&self, key: &str) -> Result<Option<f64>, String> {
        self.typed(key, "a number", Value::real)
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>, String> {
        self.typed(key, "true or false", |value| if let Value::Bool(is) = value { Some(*is) } else { None })
    }

    /// Returns a list whose items `read` understands.
    pub(super) fn list<T>(
        &self,
        key: &str,
        read: impl Fn(&Value<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, String> {
        let items = |value: &Value<'a>| match value {
            Value::List(items) => items.iter().map(&read).collect(),
            _ => None,
        };
        self.typed(key, "a list of the expected type", items)
    }

    fn typed<T>(
        &self,
        key: &str,
        kind: &str,
        read: impl Fn(&Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.keys.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| format!("key {key} is not {kind}"))
    }
}

impl<'a> Value<'a> {
    pub(super) fn count(&self) -> Option<u64> {
        if let Self::Whole(count) = self { Some(*count) } else { None }
    }

    pub(super) fn real(&self) -> Option<f64> {
        match self {
            Self::Whole(number) => Some(*number as f64),
            Self::Negative(number) => Some(*number as f64),
            Self::Real(number) => Some(*number),
            Self::Bool(_) | Self::Text(_) | Self::List(_) => None,
        }
    }

    pub(super) fn text(&self) -> Option<&'a str> {
        if let Self::Text(text) = self { Some(*text) } else { None }
    }
}

/// A position in the file.
struct Reader<'a> {
    file: &'a [u8],
    at: usize,
    /// How many more values the keys may have.
    values_left: usize,
}

/// The number of the type of a list.
const LIST: u32 = 9;

impl<'a> Reader<'a> {
    fn take(&mut self, n_bytes: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(n_bytes).filter(|end| *end <= self.file.len());
        let end = end.ok_or_else(|| format!("the file ends at byte {}, within this", self.file.len()))?;
        Ok(&self.file[std::mem::replace(&mut self.at, end)..end])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        Ok(self.take(N)?.try_into().expect("it has N bytes"))
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<&'a str, String> {
        let n_bytes = usize::try_from(self.u64()?).unwrap_or(usize::MAX);
        std::str::from_utf8(self.take(n_bytes)?).map_err(|_| "a text is not UTF-8".to_owned())
    }

    /// Reads the name of a key or tensor.
    fn name(&mut self) -> Result<&'a str, String> {
        let name = self.text()?;
        match name.len() {
            1..=NAME_BYTES_MAX => Ok(name),
            n_bytes => Err(format!("its name has {n_bytes} bytes")),
        }
    }

    fn value(&mut self) -> Result<Value<'a>, String> {
        let kind = self.u32()?;
        if kind != LIST {
            return self.value_of(kind);
        }
        let (kind, n_items) = (self.u32()?, self.u64()?);
        // One value for each item is counted before there is memory for any.
        let fits = usize::try_from(n_items).ok().filter(|n_items| *n_items <= self.values_left);
        let n_items = fits.ok_or_else(|| format!("a list of {n_items} values is too long"))?;
        let mut items = Vec::new();
        for _ in 0..n_items {
            items.push(self.value_of(kind)?);
        }
        Ok(Value::List(items))
    }

    fn value_of(&mut self, kind: u32) -> Result<Value<'a>, String> {
        self.values_left = self.values_left.checked_sub(1).ok_or("the keys have too many values")?;
        let signed = |number: i64| match u64::try_from(number) {
            Ok(whole) => Value::Whole(whole),
            Err(_) => Value::Negative(number),
        };
        Ok(match kind {
            0 => Value::Whole(u64::from(self.array::<1>()?[0])),
            1 => signed(i64::from(i8::from_le_bytes(self.array()?))),
            2 => Value::Whole(u64::from(u16::from_le_bytes(self.array()?))),
            3 => signed(i64::from(i16::from_le_bytes(self.array()?))),
            4 => Value::Whole(u64::from(self.u32()?)),
            5 => signed(i64::from(i32::from_le_bytes(self.array()?))),
            6 => Value::Real(f64::from(f32::from_le_bytes(self.array()?))),
            7 => Value::Bool(self.array::<1>()?[0] != 0),
            8 => Value::Text(self.text()?),
            10 => Value::Whole(self.u64()?),
            11 => signed(i64::from_le_bytes(self.array()?)),
            12 => Value::Real(f64::from_le_bytes(self.array()?)),
            _ => return Err(format!("values of type {kind} are not known")),
        })
    }

    fn tensor(&mut self, name: &'a str, alignment: u64) -> Result<TensorInfo<'a>, String> {
        let n_dimensions = self.u32()?;
        if !(1..=DIMENSIONS_MAX).contains(&n_dimensions) {
            return Err(format!("has {n_dimensions} dimensions"));
        }
        let mut shape = Vec::new();
        for _ in 0..n_dimensions {
            let count = self.u64()?;
            // Larger numbers could overflow when they are multiplied.
            let fits = u32::try_from(count).ok().filter(|count| *count > 0);
            shape.push(fits.ok_or_else(|| format!("has a dimension of {count}"))? as usize);
        }
        shape.reverse();
        let (kind, offset) = (self.u32()?, self.u64()?);
        let stored_as = StoredAs::of(kind)?;
        let n_bytes = stored_as.bytes(&shape)?;
        let start = usize::try_from(offset).ok().filter(|_| offset.is_multiple_of(alignment));
        let start = start.ok_or_else(|| format!("is at {offset}, which is no multiple of {alignment}"))?;
        let end = start.checked_add(n_bytes).ok_or_else(|| format!("is at {offset}"))?;
        Ok(TensorInfo { name, shape, stored_as, bytes: start..end })
    }
}
