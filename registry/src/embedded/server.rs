//! The server of the embedded registry: the router's gRPC service over the table.

use std::pin::Pin;

use async_trait::async_trait;
use chassis::Shutdown;
use chassis::identity::CertName;
use chassis::identity::call::CallRefused;
use futures::{Stream, StreamExt as _};
use proto::v1;
use proto::v1::bootstrap_server::{Bootstrap, BootstrapServer};
use proto::v1::watch_event::Event;
use tonic::{Request, Response, Status};
use types::NodeInfo;

use crate::MembershipEvent;
use crate::announcement::check;
use crate::error::RegistryError;
use crate::lock::LockName;
use crate::memory::MemoryRegistry;
use crate::table::LeaseId;

/// The service `baton.v1.Bootstrap` over a registry in memory. The process that serves it watches the same
/// registry directly.
#[derive(Debug)]
pub struct BootstrapService {
    registry: MemoryRegistry,
    /// The shutdown ends the watches, which would otherwise block a graceful stop.
    shutdown: Shutdown,
}

/// Makes the registry's service for a gRPC server.
pub fn bootstrap_server(registry: MemoryRegistry, shutdown: Shutdown) -> BootstrapServer<BootstrapService> {
    BootstrapServer::new(BootstrapService { registry, shutdown })
        .max_decoding_message_size(proto::MESSAGE_BYTES_MAX)
        .max_encoding_message_size(proto::MESSAGE_BYTES_MAX)
}

#[async_trait]
impl Bootstrap for BootstrapService {
    async fn announce(
        &self,
        request: Request<v1::AnnounceRequest>,
    ) -> Result<Response<v1::AnnounceAnswer>, Status> {
        let caller = request.extensions().get::<CertName>().cloned();
        let node = request.into_inner().node.ok_or_else(|| Status::invalid_argument("node is missing"))?;
        let node = NodeInfo::try_from(node)?;
        self.check_name(caller, &node)?;
        let lease = check(&node).and_then(|()| self.registry.grant(node)).map_err(|error| status(&error))?;
        Ok(Response::new(v1::AnnounceAnswer { lease: lease.0, ttl_ms: self.ttl_ms() }))
    }

    async fn lock(&self, request: Request<v1::LockRequest>) -> Result<Response<v1::AnnounceAnswer>, Status> {
        let name = request.into_inner().name;
        let name = LockName::ALL.into_iter().find(|known| known.as_str() == name);
        let name = name.ok_or_else(|| Status::invalid_argument("there is no lock of this name"))?;
        let lease = self.registry.take_lock(name).map_err(|error| status(&error))?;
        Ok(Response::new(v1::AnnounceAnswer { lease: lease.0, ttl_ms: self.ttl_ms() }))
    }

    async fn keep_alive(
        &self,
        request: Request<v1::KeepAliveRequest>,
    ) -> Result<Response<v1::KeepAliveAnswer>, Status> {
        let lease = LeaseId(request.into_inner().lease);
        self.registry.keep_alive(lease).map_err(|error| status(&error))?;
        Ok(Response::new(v1::KeepAliveAnswer { ttl_ms: self.ttl_ms() }))
    }

    async fn withdraw(
        &self,
        request: Request<v1::WithdrawRequest>,
    ) -> Result<Response<v1::WithdrawAnswer>, Status> {
        let lease = LeaseId(request.into_inner().lease);
        self.registry.withdraw(lease).map_err(|error| status(&error))?;
        Ok(Response::new(v1::WithdrawAnswer {}))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::WatchEvent, Status>> + Send>>;

    async fn watch(
        &self,
        _request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let (life, ttl_ms) = (self.registry.life(), self.ttl_ms());
        let shutdown = self.shutdown.clone();
        let events = self.registry.events().map(move |event| Ok(to_wire(event, life, ttl_ms)));
        Ok(Response::new(Box::pin(events.take_until(async move { shutdown.wait().await }))))
    }
}

impl BootstrapService {
    /// Refuses a node that announces another name or role than the one in its certificate.
    fn check_name(&self, caller: Option<CertName>, node: &NodeInfo) -> Result<(), Status> {
        match caller {
            Some(caller) if !caller.is_for(node.role, &node.id) => {
                let refused = CallRefused::Node { caller, role: node.role, id: node.id.clone() };
                let refused = self.registry.world().identity().call_refused(refused);
                Err(Status::unauthenticated(refused.to_string()))
            }
            _ => Ok(()),
        }
    }

    fn ttl_ms(&self) -> u64 {
        self.registry.ttl().as_millis() as u64
    }
}

fn to_wire(event: MembershipEvent, life: u64, ttl_ms: u64) -> v1::WatchEvent {
    let event = match event {
        MembershipEvent::Snapshot(nodes) => {
            Event::Snapshot(v1::Snapshot { nodes: nodes.iter().map(Into::into).collect(), life, ttl_ms })
        }
        MembershipEvent::Joined(node) => Event::Joined((&node).into()),
        MembershipEvent::Left { id, epoch } => Event::Left(v1::Left { id: id.to_string(), epoch: epoch.0 }),
    };
    v1::WatchEvent { event: Some(event) }
}

/// Converts errors to gRPC statuses. The client's `error_from` converts them back.
fn status(error: &RegistryError) -> Status {
    let message = error.to_string();
    match error {
        RegistryError::LeaseLost => Status::not_found(message),
        RegistryError::Superseded { .. } | RegistryError::LockHeld => Status::already_exists(message),
        RegistryError::Full { .. } => Status::resource_exhausted(message),
        RegistryError::InvalidNode { .. } => Status::invalid_argument(message),
        RegistryError::Url { .. }
        | RegistryError::ReadFile { .. }
        | RegistryError::Denied { .. }
        | RegistryError::Unreachable { .. }
        | RegistryError::TimedOut { .. }
        | RegistryError::Interrupted { .. }
        | RegistryError::Stopping => Status::unavailable(message),
    }
}
