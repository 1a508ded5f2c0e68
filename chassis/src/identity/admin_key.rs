//! The operators' key, required by pages that change a process or show its internals.

use std::fmt;
use std::path::Path;

use axum::Json;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::refusals::{Reason, Refusals, RefusedKind};
use super::secret::SecretError;

/// The key that a request to the operators' pages must have.
#[derive(Clone)]
pub enum AdminKey {
    /// Every request passes: only this machine reaches the port, or the operator allows open access.
    NotNeeded,
    /// Every request is refused: other machines reach the port and no key is set.
    Missing,
    /// The hash of the key that a request must have.
    Set(blake3::Hash),
}

const KEY_BYTES_MIN: usize = 16;

impl AdminKey {
    pub fn read(file: &Path) -> Result<Self, SecretError> {
        let text =
            std::fs::read(file).map_err(|source| SecretError::Read { file: file.to_owned(), source })?;
        let key = text.trim_ascii();
        match key.len() {
            bytes if bytes < KEY_BYTES_MIN => Err(SecretError::TooShort { file: file.to_owned(), bytes }),
            _ => Ok(Self::Set(blake3::hash(key))),
        }
    }

    /// Puts the key's check in front of all of `pages`.
    pub fn guard(self, pages: Router, refusals: Refusals) -> Router {
        pages.layer(middleware::from_fn_with_state((self, refusals), check))
    }

    fn refuse(&self, request: &Request) -> Option<(StatusCode, Reason, &'static str)> {
        let shown = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
        let shown = shown.and_then(|value| value.strip_prefix(b"Bearer "));
        match (self, shown) {
            (Self::NotNeeded, _) => None,
            (Self::Missing, _) => Some((
                StatusCode::FORBIDDEN,
                Reason::Unsigned,
                "this page needs an admin key and none is set: set `cluster.admin_key_file`",
            )),
            (Self::Set(_), None) => Some((
                StatusCode::UNAUTHORIZED,
                Reason::Unsigned,
                "this page needs the admin key: send `Authorization: Bearer KEY`",
            )),
            // blake3 compares hashes in constant time, so `==` reveals nothing about the key.
            (Self::Set(key), Some(shown)) if blake3::hash(shown) == *key => None,
            (Self::Set(_), Some(_)) => {
                Some((StatusCode::UNAUTHORIZED, Reason::Signature, "this is not the admin key"))
            }
        }
    }
}

async fn check(
    State((key, refusals)): State<(AdminKey, Refusals)>,
    request: Request,
    next: Next,
) -> Response {
    let Some((status, reason, message)) = key.refuse(&request) else { return next.run(request).await };
    refusals.count(RefusedKind::Page, reason);
    let error = json!({ "error": { "code": "admin_key", "message": message } });
    let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
    (status, challenge, Json(error)).into_response()
}

impl fmt::Debug for AdminKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotNeeded => "NotNeeded",
            Self::Missing => "Missing",
            Self::Set(_) => "Set",
        })
    }
}
