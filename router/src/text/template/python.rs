//! Values as Python writes them, and JSON as its `json.dumps` does.

use std::io::{Result as IoResult, Write};

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, Output, State, escape_formatter, filters};
use serde::Serialize;
use serde_json::ser::Formatter;

use super::invalid;

/// Returns a number as Python writes it: with an exponent of at least two digits below 0.0001, and from 1e16 on.
fn text_of(number: f64) -> String {
    if !number.is_finite() {
        return number.to_string().to_lowercase();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the format has an exponent");
    match exponent.parse::<i32>().expect("it is a whole number") {
        exponent @ (..-4 | 16..) => format!("{digits}e{exponent:+03}"),
        _ => format!("{number:?}"),
    }
}

fn float(value: &Value) -> Option<f64> {
    let is_float = value.is_number() && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok()).flatten()
}

/// Writes the value of an expression.
pub(super) fn write(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match float(value) {
        Some(number) => out.write_str(&text_of(number)).map_err(Error::from),
        None => escape_formatter(out, state, value),
    }
}

/// The filter `string`.
pub(super) fn string(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    float(value).map_or_else(|| filters::string(state, value), |number| Ok(text_of(number).into()))
}

/// The filter `tojson` of `transformers`, without the HTML escapes of the built-in filter.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let [after_item, after_key] = match separators {
        Some(separators) => separators.try_into().map_err(|_| invalid("separators are not two texts"))?,
        None => [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned),
    };
    let layout = Layout { indent, after_item, after_key, depth: 0, is_empty: true };
    let json = match sort_keys {
        Some(true) => {
            let mut sorted = serde_json::to_value(value).map_err(invalid)?;
            sorted.sort_all_objects();
            written(&sorted, layout)?
        }
        _ => written(value, layout)?,
    };
    Ok(if ensure_ascii.unwrap_or(false) { ascii(&json) } else { json })
}

fn written(value: &impl Serialize, layout: Layout) -> Result<String, Error> {
    let mut json = Vec::new();
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, layout)).map_err(invalid)?;
    String::from_utf8(json).map_err(invalid)
}

/// Escapes non-ASCII characters as `\uXXXX`, in surrogate pairs if needed. In JSON they occur only inside
/// strings.
fn ascii(json: &str) -> String {
    let mut units = [0; 2];
    json.chars().fold(String::with_capacity(json.len()), |mut text, character| {
        if character.is_ascii() {
            text.push(character);
        } else {
            character
                .encode_utf16(&mut units)
                .iter()
                .for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
        }
        text
    })
}

/// The layout of JSON, and the writer's place in it.
struct Layout {
    /// The spaces of each level; `None`: all is in one line.
    indent: Option<usize>,
    after_item: String,
    after_key: String,
    depth: usize,
    /// Whether the array or object that was begun last has no items yet.
    is_empty: bool,
}

impl Layout {
    fn begin<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> IoResult<()> {
        (self.depth, self.is_empty) = (self.depth + 1, true);
        writer.write_all(bracket)
    }

    fn end<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> IoResult<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.new_line(writer)?;
        }
        self.is_empty = false;
        writer.write_all(bracket)
    }

    fn item<W: ?Sized + Write>(&mut self, writer: &mut W) -> IoResult<()> {
        if !self.is_empty {
            writer.write_all(self.after_item.as_bytes())?;
        }
        self.is_empty = false;
        self.new_line(writer)
    }

    fn new_line<W: ?Sized + Write>(&self, writer: &mut W) -> IoResult<()> {
        let Some(indent) = self.indent else { return Ok(()) };
        write!(writer, "\n{:width$}", "", width = indent * self.depth)
    }
}

impl Formatter for Layout {
    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> IoResult<()> {
        writer.write_all(text_of(value).as_bytes())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> IoResult<()> {
        self.begin(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> IoResult<()> {
        self.end(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, _first: bool) -> IoResult<()> {
        self.item(writer)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> IoResult<()> {
        self.begin(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> IoResult<()> {
        self.end(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, _first: bool) -> IoResult<()> {
        self.item(writer)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> IoResult<()> {
        writer.write_all(self.after_key.as_bytes())
    }
}
