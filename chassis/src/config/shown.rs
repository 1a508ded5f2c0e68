//! The settings in force, for operators: without passwords.

use serde::Serialize;
use serde_json::Value;

/// Settings as JSON, as [`shown`] returns them.
pub type Shown = Value;

/// Returns a process's settings as JSON. Passwords in URLs are left out. Other secrets are never settings: a
/// setting names their file.
pub fn shown(raw: &impl Serialize) -> Shown {
    let mut shown = serde_json::to_value(raw).expect("settings always have a JSON form");
    hide_passwords(&mut shown);
    shown
}

fn hide_passwords(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Some(hidden) = without_password(text) {
                *text = hidden;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(hide_passwords),
        Value::Object(fields) => fields.values_mut().for_each(hide_passwords),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Returns `scheme://user:password@host/path` without the password; `None` if there is none.
fn without_password(url: &str) -> Option<String> {
    let (scheme, rest) = url.split_once("://")?;
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    // A password may contain an @ itself.
    let (user, host) = rest[..end].rsplit_once('@')?;
    let (name, _) = user.split_once(':')?;
    Some(format!("{scheme}://{name}:***@{host}{}", &rest[end..]))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn passwords_are_left_out() {
        let raw = json!({
            "registry": { "url": "etcd://joe:p@ss:word@a:2379,b:2379/blue?ca=/x@y" },
            "log": { "otlp": "http://u:secret@collector:4318" },
            "list": ["etcd://a:2379/blue", "no url with : and @", 7, true, null],
        });
        let expected = json!({
            "registry": { "url": "etcd://joe:***@a:2379,b:2379/blue?ca=/x@y" },
            "log": { "otlp": "http://u:***@collector:4318" },
            "list": ["etcd://a:2379/blue", "no url with : and @", 7, true, null],
        });
        assert_eq!(shown(&raw), expected);
    }
}
