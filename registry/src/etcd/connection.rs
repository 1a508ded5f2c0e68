//! Connections to etcd, and what its errors mean.

use std::time::Duration;

use etcd_client::{Client, ConnectOptions, Error};
use tonic::Code;

use super::settings::EtcdSettings;
use crate::error::RegistryError;

const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// A peer that is there and silent (stopped, or cut off) is noticed after interval + timeout. That must be well
/// before its leases lapse, or a watch would believe the departures that an etcd reports when it wakes.
const PING_INTERVAL: Duration = Duration::from_secs(2);
const PING_TIMEOUT: Duration = Duration::from_secs(2);

/// Connects and, where there is a user, authenticates. Without one nothing is sent until the first call.
pub(crate) async fn connect(settings: &EtcdSettings) -> Result<Client, RegistryError> {
    let options = ConnectOptions::new()
        .with_connect_timeout(CONNECT_WITHIN)
        .with_keep_alive(PING_INTERVAL, PING_TIMEOUT)
        // A member that has lost its cluster must not serve us an old state as if it were the present.
        .with_require_leader(true)
        .with_auto_token_refresh(true);
    let options = match &settings.tls {
        Some(tls) => options.with_tls(tls.options()?),
        None => options,
    };
    let options = match &settings.user {
        Some(user) => options.with_user(&user.name, &user.password),
        None => options,
    };
    Client::connect(&settings.endpoints, Some(options))
        .await
        .map_err(|error| refused("connect to etcd", error))
}

/// Sorts etcd's errors into those that waiting may mend and those that it does not.
pub(crate) fn refused(operation: &'static str, error: Error) -> RegistryError {
    let denied = match &error {
        Error::GRpcStatus(status) => is_denial(status),
        Error::InvalidArgs(_)
        | Error::InvalidUri(_)
        | Error::TransportError(_)
        | Error::InvalidMetadataValue(_) => true,
        _ => false,
    };
    let source = Box::new(error);
    if denied {
        RegistryError::Denied { operation, source }
    } else {
        RegistryError::Unreachable { operation, source }
    }
}

/// A token that has expired is no denial (a new connection gets a new one); a wrong password is, and comes as an
/// invalid argument.
fn is_denial(status: &tonic::Status) -> bool {
    matches!(
        status.code(),
        Code::InvalidArgument | Code::PermissionDenied | Code::FailedPrecondition | Code::Unimplemented
    )
}
