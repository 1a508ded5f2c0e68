//! A client for the part of etcd's API that Baton uses: one connection to all members, with the user's token.

use std::time::Duration;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use super::settings::EtcdSettings;
use crate::error::{Cause, RegistryError};
use crate::url::User;

/// The messages and calls of etcd's API that `rpc.proto` declares.
#[allow(clippy::all, clippy::pedantic, missing_debug_implementations)]
pub mod v3 {
    tonic::include_proto!("etcdserverpb");
}

use v3::auth_client::AuthClient;
use v3::kv_client::KvClient;
use v3::lease_client::LeaseClient;
use v3::watch_client::WatchClient;

const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// Interval of pings. A connected but silent member is detected after interval and timeout. Leases must not
/// expire before that: a watch would believe the departures that such a member reports when it resumes.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(2);
const PING_TIMEOUT: Duration = Duration::from_secs(2);

type EtcdChannel = InterceptedService<Channel, CallHeaders>;

/// A client of one etcd cluster, with a connection to each member. Cheap to clone; the connections close with
/// the last clone.
#[derive(Clone, Debug)]
pub struct EtcdClient {
    channel: EtcdChannel,
}

impl EtcdClient {
    /// Makes a client, and authenticates if `settings` has a user. Without a user, nothing is sent before the
    /// first call.
    pub async fn connect(settings: &EtcdSettings) -> Result<Self, RegistryError> {
        let endpoints: Result<Vec<Endpoint>, RegistryError> =
            settings.endpoints.iter().map(|address| endpoint(address, settings)).collect();
        let channel = Channel::balance_list(endpoints?.into_iter());
        let token = match &settings.user {
            Some(user) => Some(authenticate(channel.clone(), user).await?),
            None => None,
        };
        Ok(Self { channel: InterceptedService::new(channel, CallHeaders { token }) })
    }

    pub fn kv(&self) -> KvClient<EtcdChannel> {
        KvClient::new(self.channel.clone()).max_decoding_message_size(proto::MESSAGE_BYTES_MAX)
    }

    pub fn lease(&self) -> LeaseClient<EtcdChannel> {
        LeaseClient::new(self.channel.clone())
    }

    pub fn watch(&self) -> WatchClient<EtcdChannel> {
        WatchClient::new(self.channel.clone())
    }

    pub fn auth(&self) -> AuthClient<EtcdChannel> {
        AuthClient::new(self.channel.clone())
    }
}

fn endpoint(address: &str, settings: &EtcdSettings) -> Result<Endpoint, RegistryError> {
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let endpoint =
        Endpoint::from_shared(format!("{scheme}://{address}")).map_err(|error| unusable(error.into()))?;
    let endpoint = endpoint
        .connect_timeout(CONNECT_WITHIN)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true);
    match &settings.tls {
        Some(tls) => endpoint.tls_config(tls.options()?).map_err(|error| unusable(error.into())),
        None => Ok(endpoint),
    }
}

async fn authenticate(channel: Channel, user: &User) -> Result<MetadataValue<Ascii>, RegistryError> {
    let request = v3::AuthenticateRequest { name: user.name.clone(), password: user.password.clone() };
    let answer = AuthClient::new(channel).authenticate(request).await;
    let token = answer.map_err(|status| failed("connect to etcd", status))?.into_inner().token;
    MetadataValue::try_from(token).map_err(|error| unusable(error.into()))
}

/// Makes the error for settings, or files named in them, that cannot be used. A retry does not help.
fn unusable(source: Cause) -> RegistryError {
    RegistryError::Denied { operation: "connect to etcd", source }
}

/// Classifies an etcd error: a denial, which no retry resolves, or an unreachable etcd.
pub(crate) fn failed(operation: &'static str, status: Status) -> RegistryError {
    let is_denied = is_denial(&status);
    let source = Box::new(status);
    if is_denied {
        RegistryError::Denied { operation, source }
    } else {
        RegistryError::Unreachable { operation, source }
    }
}

/// Returns whether etcd denied the call. An expired token is no denial (a new connection gets a new one). A
/// wrong password is, and etcd reports it as an invalid argument.
fn is_denial(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::InvalidArgument | Code::PermissionDenied | Code::FailedPrecondition | Code::Unimplemented
    )
}

/// Returns whether a call failed only because the connection's token has expired.
pub(crate) fn token_expired(error: &RegistryError) -> bool {
    let RegistryError::Unreachable { source, .. } = error else { return false };
    source.downcast_ref::<Status>().is_some_and(|status| status.code() == Code::Unauthenticated)
}

/// Adds the user's token to every call, and requires an etcd member with a leader.
#[derive(Clone, Debug)]
pub struct CallHeaders {
    token: Option<MetadataValue<Ascii>>,
}

impl Interceptor for CallHeaders {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        // With this header a member that has lost contact to its cluster refuses the call instead of serving
        // old data.
        request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        Ok(request)
    }
}

/// Returns the end of the range of all keys with this prefix: the prefix with its last byte incremented.
pub fn prefix_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        // UTF-8 has no byte 0xff, so the increment cannot overflow.
        *last += 1;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_before_the_next_sibling() {
        assert_eq!(prefix_end("/baton/a/"), b"/baton/a0");
        assert_eq!(prefix_end(""), b"");
    }

    #[test]
    fn errors_say_whether_waiting_helps() {
        for (code, is_final) in [
            (Code::InvalidArgument, true),
            (Code::PermissionDenied, true),
            (Code::FailedPrecondition, true),
            (Code::Unimplemented, true),
            (Code::Unauthenticated, false),
            (Code::Unavailable, false),
            (Code::Unknown, false),
        ] {
            let error = failed("read", Status::new(code, "reason"));
            assert_eq!(error.is_final(), is_final, "{code:?}");
            assert_eq!(token_expired(&error), code == Code::Unauthenticated, "{code:?}");
        }
    }
}
