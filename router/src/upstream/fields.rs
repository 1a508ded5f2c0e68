//! The fields of a request's JSON object. Values that the router does not set stay as the client wrote them.

use std::borrow::Cow;

use bytes::Bytes;
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Deserializer;

use crate::error::AcceptError;

/// The fields of a JSON object in their order, with the text of each value. Of equal names the last value
/// counts, as in the engines' parsers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fields<'a>(Vec<Field<'a>>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Field<'a> {
    name: String,
    value: Cow<'a, [u8]>,
}

/// A field as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WrittenField<'a> {
    pub(crate) name: Cow<'a, str>,
    /// The text of the value, without space around it.
    pub(crate) value: &'a [u8],
}

/// Divides a JSON object into its fields in their order, with repeated names. An error says why the text is no JSON
/// object.
pub(crate) fn divided(text: &[u8]) -> Result<Vec<WrittenField<'_>>, String> {
    Scan { text, at: 0 }.object()
}

impl<'a> Fields<'a> {
    /// Divides an object into its fields. An error says why the text is no JSON object.
    pub fn parse(text: &'a [u8]) -> Result<Self, AcceptError> {
        let mut fields = Self(Vec::new());
        for WrittenField { name, value } in
            divided(text).map_err(|reason| AcceptError::invalid("body", reason))?
        {
            fields.put(name.into_owned(), Cow::Borrowed(value));
        }
        Ok(fields)
    }

    /// Returns the value of a field, if it is there and has this type.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let field = self.0.iter().find(|field| field.name == name)?;
        serde_json::from_slice(&field.value).ok()
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|field| field.name == name)
    }

    /// Sets a field, in its place if it is there.
    pub fn set(&mut self, name: &str, value: &impl Serialize) {
        let text = serde_json::to_vec(value).expect("plain values can be written");
        self.put(name.to_owned(), Cow::Owned(text));
    }

    /// Sets a field only if it is there.
    pub fn replace(&mut self, name: &str, value: &impl Serialize) {
        if self.has(name) {
            self.set(name, value);
        }
    }

    pub fn remove(&mut self, name: &str) {
        self.0.retain(|field| field.name != name);
    }

    fn put(&mut self, name: String, value: Cow<'a, [u8]>) {
        match self.0.iter_mut().find(|field| field.name == name) {
            Some(field) => field.value = value,
            None => self.0.push(Field { name, value }),
        }
    }

    /// Writes the object.
    pub fn write(&self) -> Bytes {
        let size: usize = self.0.iter().map(|field| field.name.len() + field.value.len() + 4).sum();
        let mut out = Vec::with_capacity(size + 2);
        out.push(b'{');
        for (nth, field) in self.0.iter().enumerate() {
            if nth > 0 {
                out.push(b',');
            }
            serde_json::to_writer(&mut out, &field.name).expect("a string can be written");
            out.push(b':');
            out.extend_from_slice(&field.value);
        }
        out.push(b'}');
        out.into()
    }
}

/// A position in the text of an object.
struct Scan<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Scan<'a> {
    fn object(&mut self) -> Result<Vec<WrittenField<'a>>, String> {
        let mut fields = Vec::new();
        self.expect(b'{')?;
        if self.next() != Some(b'}') {
            loop {
                fields.push(self.field()?);
                match self.next() {
                    Some(b',') => self.at += 1,
                    _ => break,
                }
            }
        }
        self.expect(b'}')?;
        match self.next() {
            None => Ok(fields),
            Some(_) => Err(self.unexpected()),
        }
    }

    fn field(&mut self) -> Result<WrittenField<'a>, String> {
        if self.next() != Some(b'"') {
            return Err(self.unexpected());
        }
        let name = name(self.value()?).map_err(|error| format!("a field's name: {error}"))?;
        self.expect(b':')?;
        self.next();
        Ok(WrittenField { name, value: self.value()? })
    }

    /// Returns the text of the value at the position, and moves behind it.
    fn value(&mut self) -> Result<&'a [u8], String> {
        let (text, begin) = (self.text, self.at);
        let mut values = Deserializer::from_slice(&text[begin..]).into_iter::<IgnoredAny>();
        match values.next() {
            Some(Ok(_)) => {
                self.at = begin + values.byte_offset();
                Ok(&text[begin..self.at])
            }
            Some(Err(error)) => Err(format!("the body is not JSON: byte {begin}: {error}")),
            None => Err(self.unexpected()),
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), String> {
        if self.next() != Some(byte) {
            return Err(self.unexpected());
        }
        self.at += 1;
        Ok(())
    }

    /// Skips white space. Returns the next byte.
    fn next(&mut self) -> Option<u8> {
        let is_space = |byte: &u8| matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
        self.at += self.text[self.at..].iter().take_while(|byte| is_space(byte)).count();
        self.text.get(self.at).copied()
    }

    fn unexpected(&self) -> String {
        match self.text.get(self.at) {
            Some(byte) => {
                let byte = byte.escape_ascii();
                format!("the body is not a JSON object: unexpected `{byte}` at byte {}", self.at)
            }
            None => "the body is not a JSON object: it ends early".to_owned(),
        }
    }
}

/// Reads a name, without a copy where it has no escapes.
fn name(text: &[u8]) -> Result<Cow<'_, str>, serde_json::Error> {
    match serde_json::from_slice::<&str>(text) {
        Ok(plain) => Ok(Cow::Borrowed(plain)),
        Err(_) => serde_json::from_slice::<String>(text).map(Cow::Owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> Result<String, String> {
        let fields = Fields::parse(text.as_bytes()).map_err(|error| error.to_string())?;
        Ok(String::from_utf8(fields.write().to_vec()).expect("UTF-8"))
    }

    #[test]
    fn values_stay_as_they_were_written() {
        for (text, expected) in [
            ("{}", "{}"),
            (" { } ", "{}"),
            (r#"{"a":1.0}"#, r#"{"a":1.0}"#),
            (
                r#"{"a" : 1e400 , "b": -0, "c":12345678901234567890123}"#,
                r#"{"a":1e400,"b":-0,"c":12345678901234567890123}"#,
            ),
            (
                r#"{"a": [1, {"b" : "}"}], "\u0041\n": "\ud83d\ude00"}"#,
                r#"{"a":[1, {"b" : "}"}],"A\n":"\ud83d\ude00"}"#,
            ),
            (r#"{"a":1,"b":true,"a":null}"#, r#"{"a":null,"b":true}"#),
        ] {
            assert_eq!(written(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for text in [
            "",
            "[]",
            "7",
            "{",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{\"a\":1} x",
            "{a:1}",
            "{\"a\":tru}",
            "{\"a\":1 2}",
        ] {
            let refused = written(text).expect_err(text);
            assert!(refused.starts_with("body: "), "{refused}");
        }
    }

    #[test]
    fn fields_are_set_in_their_place() {
        let mut fields = Fields::parse(br#"{"stream":true,"n":2,"min_tokens":5}"#).expect("an object");
        assert_eq!(
            (fields.get::<u32>("n"), fields.get::<u32>("stream"), fields.get::<u32>("x")),
            (Some(2), None, None)
        );
        fields.set("stream", &false);
        fields.replace("max_completion_tokens", &1);
        fields.remove("min_tokens");
        fields.set("max_tokens", &1);
        assert_eq!(&fields.write()[..], br#"{"stream":false,"n":2,"max_tokens":1}"#);
    }
}
