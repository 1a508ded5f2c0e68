//! The certificate authorities that identify a hub.

use std::error::Error;
use std::io;

use hyper_rustls::HttpsConnectorBuilder;
use hyper_rustls::builderstates::WantsSchemes;
use rustls::{CertificateError, ClientConfig, RootCertStore};

use crate::error::HubError;
use crate::settings::Authorities;

/// Sets up TLS with the authorities in the settings, or with the machine's, which may include a company's. If
/// the machine has none, those that browsers trust are used.
pub(crate) fn tls(named: &Authorities) -> Result<HttpsConnectorBuilder<WantsSchemes>, HubError> {
    let (ring, builder) = (rustls::crypto::ring::default_provider, HttpsConnectorBuilder::new);
    if let Some(roots) = roots(named)? {
        let config = ClientConfig::builder_with_provider(ring().into()).with_safe_default_protocol_versions();
        let config = config.map_err(HubError::Tls)?.with_root_certificates(roots).with_no_client_auth();
        return Ok(builder().with_tls_config(config));
    }
    match builder().with_provider_and_native_roots(ring()) {
        Ok(tls) => Ok(tls),
        Err(_) => builder().with_provider_and_webpki_roots(ring()).map_err(HubError::Tls),
    }
}

fn roots(Authorities { file, folder }: &Authorities) -> Result<Option<RootCertStore>, HubError> {
    let mut roots = RootCertStore::empty();
    for (file, folder) in [(file.as_deref(), None), (None, folder.as_deref())] {
        let Some(path) = file.or(folder) else { continue };
        let found = rustls_native_certs::load_certs_from_paths(file, folder);
        roots.add_parsable_certificates(found.certs);
        if roots.is_empty() {
            let reason = found.errors.first().map_or("it holds none".to_owned(), ToString::to_string);
            return Err(HubError::Authorities { path: path.to_owned(), reason });
        }
    }
    Ok((!roots.is_empty()).then_some(roots))
}

/// Returns the reason why a certificate was refused, if that is among the causes of the error.
pub(crate) fn refusal(error: &(dyn Error + 'static)) -> Option<CertificateError> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(rustls::Error::InvalidCertificate(why)) = error.downcast_ref() {
            return Some(why.clone());
        }
        // The inner error of an I/O error is visited instead of its source, because that source is the inner
        // error's own.
        let inside = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        next = inside.map(|inside| inside as &(dyn Error + 'static)).or_else(|| error.source());
    }
    None
}
