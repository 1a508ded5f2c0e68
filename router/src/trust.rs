//! The authorities that the router's own HTTPS clients trust.

use hyper_rustls::HttpsConnectorBuilder;
use hyper_rustls::builderstates::WantsSchemes;
use rustls::crypto::ring::default_provider;

/// Sets up TLS with the machine's authorities, or with those that browsers trust if the machine has none.
pub(crate) fn tls() -> HttpsConnectorBuilder<WantsSchemes> {
    let builder = HttpsConnectorBuilder::new;
    match builder().with_provider_and_native_roots(default_provider()) {
        Ok(tls) => tls,
        Err(_) => {
            let browsers = builder().with_provider_and_webpki_roots(default_provider());
            browsers.expect("ring has the ciphers of TLS 1.2 and 1.3")
        }
    }
}
