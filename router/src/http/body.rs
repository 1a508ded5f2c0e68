//! A request's body: limited in size and time, and parsed as JSON with errors that name the field.

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use chassis::server::BodyBudgetSpent;
use http_body_util::BodyExt;
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer as _, MapAccess, Visitor};

use super::error::{Code, HttpError};
use crate::error::{RETRY_AFTER, ServeError};
use crate::upstream::fields::{WrittenField, divided};

/// The limits of a request's body in size and time.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimits {
    pub bytes_max: usize,
    pub within: Duration,
}

impl Default for BodyLimits {
    fn default() -> Self {
        // The default of 8 MiB holds a prompt of a million tokens, which is about 5 MB of text.
        Self { bytes_max: 8 << 20, within: Duration::from_secs(30) }
    }
}

/// A body is read up to this multiple of `bytes_max` before it is refused, and the excess is dropped. A client that is cut
/// off while it writes would see a broken connection instead of the refusal.
const DISCARDED_FACTOR: usize = 8;

/// Reads a whole body, within its limits.
pub(crate) async fn read(body: Body, limits: BodyLimits) -> Result<Bytes, HttpError> {
    match tokio::time::timeout(limits.within, collect(body, limits.bytes_max)).await {
        Ok(read) => read,
        Err(_) => {
            let message = format!("the body did not arrive within {} ms", limits.within.as_millis());
            Err(HttpError::new(Code::BodyTimeout, message).context("body"))
        }
    }
}

async fn collect(mut body: Body, bytes_max: usize) -> Result<Bytes, HttpError> {
    let (mut kept, mut n_seen) = (BytesMut::new(), 0);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| broken(&error))?;
        let Ok(data) = frame.into_data() else { continue };
        n_seen += data.len();
        if n_seen <= bytes_max {
            kept.extend_from_slice(&data);
        } else if n_seen > bytes_max * DISCARDED_FACTOR {
            break;
        }
    }
    if n_seen > bytes_max {
        let message = format!("the body has more than {bytes_max} bytes");
        return Err(HttpError::new(Code::BodyTooLarge, message).context("body"));
    }
    Ok(kept.freeze())
}

/// Makes the error for a body whose connection broke, or that was aborted for the byte budget.
fn broken(error: &axum::Error) -> HttpError {
    let spent = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source())
        .find_map(|error| error.downcast_ref::<BodyBudgetSpent>());
    match spent {
        Some(spent) => ServeError::Overloaded { retry_after: RETRY_AFTER, reason: spent.to_string() }.into(),
        None => HttpError::new(Code::InvalidJson, error.to_string()).context("body"),
    }
}

/// A request's JSON object, divided into its fields once. Several types read their fields from it.
#[derive(Debug)]
pub(crate) struct JsonBody<'a> {
    text: &'a [u8],
    /// `None`: the text is no JSON object.
    fields: Option<Vec<WrittenField<'a>>>,
}

impl<'a> JsonBody<'a> {
    pub(crate) fn of(text: &'a [u8]) -> Self {
        let is_text = std::str::from_utf8(text).is_ok();
        Self { text, fields: is_text.then(|| divided(text).ok()).flatten() }
    }

    /// Reads the fields that `T` has.
    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Result<T, HttpError> {
        let read = self.fields.as_deref().and_then(|fields| T::deserialize(FieldReader(fields)).ok());
        // On an error the whole text is read again, which finds the error's position.
        read.map_or_else(|| parse(self.text), Ok)
    }

    /// Returns the fields in their order; none if the text is no JSON object.
    pub(crate) fn fields(&self) -> &[WrittenField<'a>] {
        self.fields.as_deref().unwrap_or_default()
    }
}

/// Reads a struct from the fields that it has. The other fields are not looked at.
struct FieldReader<'f, 'a>(&'f [WrittenField<'a>]);

/// The fields that a struct has, while it is read.
struct WantedFields<'f, 'a> {
    left: std::slice::Iter<'f, WrittenField<'a>>,
    names: &'static [&'static str],
    value: &'a [u8],
}

impl<'de> Deserializer<'de> for FieldReader<'_, 'de> {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Self::Error> {
        Err(serde::de::Error::custom("only structs are read from fields"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_map(WantedFields { left: self.0.iter(), names, value: &[] })
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'de> MapAccess<'de> for WantedFields<'_, 'de> {
    type Error = serde_json::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Self::Error> {
        let Some(field) = self.left.find(|field| self.names.contains(&&*field.name)) else { return Ok(None) };
        self.value = field.value;
        seed.deserialize(field.name.as_ref().into_deserializer()).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Self::Error> {
        seed.deserialize(&mut serde_json::Deserializer::from_slice(self.value))
    }
}

/// Parses JSON, independent of the content type. An error names the field: `messages[2].content`.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, HttpError> {
    let text =
        std::str::from_utf8(body).map_err(|error| not_json(format!("the body is not UTF-8: {error}")))?;
    // A list is refused here, because serde would read its elements as an object's fields in order.
    if text.trim_start().starts_with('[') {
        return Err(not_an_object("it is a list"));
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| bad_field(&error))?;
    json.end().map_err(|error| not_json(format!("the body is not JSON: {error}")))?;
    Ok(value)
}

fn bad_field(error: &serde_path_to_error::Error<serde_json::Error>) -> HttpError {
    let (path, inner) = (error.path().to_string(), error.inner());
    if !inner.is_data() {
        return not_json(format!("the body is not JSON: {inner}"));
    }
    match path.as_str() {
        "." => not_an_object(&inner.to_string()),
        field => HttpError::new(Code::InvalidValue, format!("{field}: {inner}")).context(field),
    }
}

fn not_an_object(reason: &str) -> HttpError {
    HttpError::new(Code::InvalidValue, format!("the body is not an object: {reason}")).context("body")
}

fn not_json(message: String) -> HttpError {
    HttpError::new(Code::InvalidJson, message).context("body")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use futures::StreamExt;
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "only whether it parses is looked at")]
    struct Example {
        count: Option<u32>,
        list: Option<Vec<BTreeMap<String, f32>>>,
    }

    fn check(body: &[u8], code: Code, param: &str) {
        let error = parse::<Example>(body).expect_err("refused");
        assert_eq!((error.code, error.param.as_deref()), (code, Some(param)), "{}", error.message);
        let divided = JsonBody::of(body).parse::<Example>().expect_err("refused");
        assert_eq!(divided.message, error.message);
    }

    #[test]
    fn each_type_reads_its_own_fields() {
        #[derive(Debug, Deserialize)]
        struct Other {
            name: Option<String>,
        }
        let body =
            JsonBody::of(br#" {"list": [{"5": 1.5}], "na\u006de": "a\n", "more": [1, {}], "count": 3} "#);
        let (example, other): (Example, Other) = (body.parse().expect("fits"), body.parse().expect("fits"));
        assert_eq!((example.count, example.list.map(|list| list.len())), (Some(3), Some(1)));
        assert_eq!(other.name.as_deref(), Some("a\n"));
        assert_eq!(body.fields().len(), 4);
        check(br#"{"count": 1, "count": 2}"#, Code::InvalidValue, "body");
    }

    #[test]
    fn what_is_wrong_has_a_name() {
        check(b"{\"count\": 1", Code::InvalidJson, "body");
        check(b"", Code::InvalidJson, "body");
        check(b"{\"count\": \"\xff\"}", Code::InvalidJson, "body");
        check(b"{} {}", Code::InvalidJson, "body");
        check(b"[]", Code::InvalidValue, "body");
        check(b"7", Code::InvalidValue, "body");
        check(b"{\"count\": -1}", Code::InvalidValue, "count");
        check(b"{\"count\": 1.5}", Code::InvalidValue, "count");
        check(b"{\"list\": [{}, {\"1\": \"x\"}]}", Code::InvalidValue, "list[1].1");
    }

    #[test]
    fn what_is_unknown_or_null_is_ignored() {
        assert!(
            parse::<Example>(b" {\"count\": null, \"other\": {\"a\": []}, \"list\": [{\"5\": 1}]}\n").is_ok()
        );
    }

    fn pieces(n: usize, size: usize) -> Body {
        let piece = Bytes::from(vec![b' '; size]);
        Body::from_stream(futures::stream::iter(vec![Ok::<_, Infallible>(piece); n]))
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_are_bounded() {
        let limits = BodyLimits { bytes_max: 100, within: Duration::from_secs(1) };
        assert_eq!(read(pieces(10, 10), limits).await.expect("fits").len(), 100);
        for n in [11, 1000] {
            assert_eq!(read(pieces(n, 10), limits).await.expect_err("too large").code, Code::BodyTooLarge);
        }
        let endless = futures::stream::pending::<Result<Bytes, Infallible>>().boxed();
        assert_eq!(
            read(Body::from_stream(endless), limits).await.expect_err("too slow").code,
            Code::BodyTimeout
        );
    }
}
