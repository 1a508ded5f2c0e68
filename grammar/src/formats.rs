//! `format` of JSON Schema where llguidance's own rule allows too much: dates, times and names of hosts.
//!
//! A rule here allows no text that is invalid. It forbids a few valid ones: leap seconds with an offset from UTC, and
//! names of hosts in Punycode, whose validity no regular expression can say.

use serde_json::{Map, Value, json};

use crate::parts::Parts;

/// The most characters of the name of a host.
const HOSTNAME_MAX: u64 = 253;
/// One label of a name of a host: at most 63 characters, and no two hyphens at the third and fourth place.
const LABEL: &str = "[a-zA-Z0-9](?:[a-zA-Z0-9]|[a-zA-Z0-9-][a-zA-Z0-9](?:[a-zA-Z0-9-]{0,59}[a-zA-Z0-9])?\
                     |[a-zA-Z0-9-]-[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?)?";
/// A date without the 29th of February.
const COMMON_DATE: &str = "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])\
                           |(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))";
const LEAP_YEAR: &str = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)";
/// A time without leap second.
const COMMON_TIME: &str =
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
/// A leap second: the last second of a day in UTC.
const LEAP_SECOND: &str = r"23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00)";

/// Replaces these formats by patterns, in a schema and in all schemas in it.
pub(crate) fn enforce(schema: &mut Value) {
    let Some(fields) = schema.as_object_mut() else { return };
    if let Some(pattern) = fields.get("format").and_then(Value::as_str).and_then(pattern) {
        if fields.remove("format") == Some(json!("hostname")) {
            limit(fields, HOSTNAME_MAX);
        }
        require(fields, pattern);
    }
    for (name, value) in fields {
        match (Parts::under(name), value) {
            (Some(Parts::Map), Value::Object(parts)) => parts.values_mut().for_each(enforce),
            (Some(Parts::List), Value::Array(parts)) => parts.iter_mut().for_each(enforce),
            (Some(Parts::One), part) => enforce(part),
            _ => {}
        }
    }
}

fn pattern(format: &str) -> Option<String> {
    let date = format!("(?:{COMMON_DATE}|{LEAP_YEAR}-02-29)");
    let time = format!("(?:{COMMON_TIME}|{LEAP_SECOND})");
    let pattern = match format {
        "date" => date,
        "time" => time,
        "date-time" => format!("{date}[tT]{time}"),
        "hostname" => format!(r"{LABEL}(?:\.{LABEL})*"),
        _ => return None,
    };
    Some(format!("^{pattern}$"))
}

/// Adds a pattern to a schema that may have one.
fn require(fields: &mut Map<String, Value>, pattern: String) {
    if !fields.contains_key("pattern") {
        fields.insert("pattern".to_owned(), pattern.into());
        return;
    }
    let all = fields.entry("allOf").or_insert_with(|| json!([]));
    if let Value::Array(all) = all {
        all.push(json!({ "pattern": pattern }));
    }
}

/// Bounds the length of texts, unless a bound that is as low is there. One that is no number is refused later.
fn limit(fields: &mut Map<String, Value>, n_characters: u64) {
    let bound = fields.entry("maxLength").or_insert_with(|| n_characters.into());
    if bound.as_u64().is_some_and(|bound| bound > n_characters) {
        *bound = n_characters.into();
    }
}
