//! The checks of a peer's certificate: signed by the cluster's CA, valid now, with an expected name.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme};

use super::refused::TlsRefused;
use crate::identity::certificate::{CertName, ExpectedPeer};

/// Checks the CA and the validity of a certificate, as a dialer does.
pub(super) fn check_chain(
    certificate: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    roots: &RootCertStore,
    provider: &CryptoProvider,
    now: UnixTime,
) -> Result<(), Error> {
    let parsed = ParsedCertificate::try_from(certificate)?;
    let algorithms = provider.signature_verification_algorithms.all;
    verify_server_cert_signed_by_trust_anchor(&parsed, roots, intermediates, now, algorithms)
}

/// The name in the certificate, if it is of the cluster `own` and the expected one.
pub(super) fn check_name(
    certificate: &CertificateDer<'_>,
    own: &str,
    expected: Option<&ExpectedPeer>,
) -> Result<CertName, TlsRefused> {
    let name = CertName::of(certificate).ok_or(TlsRefused::Unnamed)?;
    if name.cluster != own {
        return Err(TlsRefused::Cluster { name, own: own.to_owned() });
    }
    match expected {
        Some(expected) if !expected.accepts(&name) => {
            Err(TlsRefused::Role { name, expected: expected.to_string() })
        }
        _ => Ok(name),
    }
}

/// The dialer's check. Host names are not compared: the name in the certificate says which process it is for.
#[derive(Debug)]
pub(super) struct AcceptorCheck {
    pub(super) roots: Arc<RootCertStore>,
    pub(super) provider: Arc<CryptoProvider>,
    pub(super) cluster: String,
    pub(super) expected: ExpectedPeer,
}

impl ServerCertVerifier for AcceptorCheck {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        check_chain(end_entity, intermediates, &self.roots, &self.provider, now)?;
        check_name(end_entity, &self.cluster, Some(&self.expected)).map_err(TlsRefused::into_rustls)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// The acceptor's check: rustls's own, and the name.
#[derive(Debug)]
pub(super) struct DialerCheck {
    pub(super) chain: Arc<dyn ClientCertVerifier>,
    pub(super) cluster: String,
    /// `None`: every role, because each call has its own callers.
    pub(super) expected: Option<ExpectedPeer>,
}

impl ClientCertVerifier for DialerCheck {
    fn client_auth_mandatory(&self) -> bool {
        self.chain.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.chain.verify_client_cert(end_entity, intermediates, now)?;
        check_name(end_entity, &self.cluster, self.expected.as_ref()).map_err(TlsRefused::into_rustls)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
