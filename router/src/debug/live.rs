//! The live page of the admin port: one HTML file that reads `/metrics` and `/debug`, and holds no state here.

use std::sync::LazyLock;

use axum::response::{Html, IntoResponse};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::header;
use ring::digest::{SHA256, digest};

/// The page with its style and its script. It needs no key: it contains no data.
const PAGE: &str = include_str!("live.html");

/// The browser runs only this page's own script and style, which the policy names by their hashes, and sends
/// requests only to this port.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let (script, style) = (hash_of("script"), hash_of("style"));
    format!(
        "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
});

pub(super) async fn page() -> impl IntoResponse {
    let headers = [
        (header::CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (header::CACHE_CONTROL, "no-store"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, Html(PAGE))
}

/// Returns the hash of the page's only element of this name, in the form of a policy.
fn hash_of(element: &str) -> String {
    let text = PAGE.split_once(&format!("<{element}>")).and_then(|(_, rest)| rest.split_once("</"));
    let (text, _) = text.expect("the page has one script and one style, without attributes");
    format!("'sha256-{}'", BASE64_STANDARD.encode(digest(&SHA256, text.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_loads_nothing_and_makes_no_html_from_data() {
        for (element, count) in [("<script", 1), ("<style", 1), ("<link", 1), ("<img", 0), ("<iframe", 0)] {
            assert_eq!(PAGE.matches(element).count(), count, "{element}");
        }
        for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=\""] {
            assert!(!PAGE.contains(word), "{word}");
        }
        let addresses = PAGE.split(['"', '\'', '`', ' ']).filter(|word| word.contains("://"));
        let loaded: Vec<&str> = addresses.filter(|word| *word != "http://www.w3.org/2000/svg").collect();
        assert!(loaded.is_empty(), "{loaded:?}");
    }

    #[test]
    fn the_policy_names_the_script_and_the_style() {
        assert_eq!(POLICY.matches("'sha256-").count(), 2, "{}", *POLICY);
        assert_ne!(hash_of("script"), hash_of("style"));
        assert!(PAGE.ends_with("</script>\n</body>\n</html>\n"), "the script holds no `</`");
    }
}
