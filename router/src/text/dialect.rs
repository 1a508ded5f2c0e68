//! Features of Hugging Face's Jinja2 dialect that chat templates use and minijinja lacks.

use std::borrow::Cow;

use minijinja::value::{Value, from_args};
use minijinja::{Error, State};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Converts a template to minijinja's syntax.
///
/// `{% generation %}` marks the model's output for training. For serving, the marked text is an ordinary
/// block.
pub(super) fn translated(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return source.into();
    }
    let mut translated = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag, after)) = next_tag(rest) {
        translated.push_str(before);
        translated.push_str(&translated_tag(tag));
        rest = after;
    }
    translated.push_str(rest);
    translated.into()
}

/// Returns the text before the next tag, the tag with its `{%` and `%}`, and the text after it.
fn next_tag(text: &str) -> Option<(&str, &str, &str)> {
    let start = text.find("{%")?;
    let end = start + text[start..].find("%}")? + "%}".len();
    Some((&text[..start], &text[start..end], &text[end..]))
}

/// Converts one tag. The signs `-` and `+` beside the word control white space and are kept.
fn translated_tag(tag: &str) -> Cow<'_, str> {
    let word = tag.trim_matches(['{', '%', '}']).trim_matches(['-', '+']).trim();
    match word {
        "generation" => tag.replace(word, "if true").into(),
        "endgeneration" => tag.replace(word, "endif").into(),
        _ => tag.into(),
    }
}

/// Implements the methods of Python's strings, lists and dictionaries that templates call.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (name, value.as_str()) {
        ("removeprefix", Some(text)) => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        ("removesuffix", Some(text)) => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_are_blocks() {
        for (source, expected) in [
            ("a{% generation %}b{% endgeneration %}c", "a{% if true %}b{% endif %}c"),
            ("{%- generation -%}b{%-endgeneration+%}", "{%- if true -%}b{%-endif+%}"),
            ("{% if add_generation_prompt %}x{% endif %}", "{% if add_generation_prompt %}x{% endif %}"),
            ("generation {% unended", "generation {% unended"),
            ("no tag", "no tag"),
        ] {
            assert_eq!(translated(source), expected);
        }
    }
}
