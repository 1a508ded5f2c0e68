//! Conversions for a node's announcement.

use types::{Epoch, MissingWire, ModelInfo, NodeId, NodeInfo, ProtocolRange, Role, Scheme, TokenId};

use super::{narrow, present};
use crate::error::ConvertError;
use crate::v1;

impl From<ProtocolRange> for v1::ProtocolRange {
    fn from(range: ProtocolRange) -> Self {
        Self { min: range.min.into(), max: range.max.into() }
    }
}

impl TryFrom<v1::ProtocolRange> for ProtocolRange {
    type Error = ConvertError;

    fn try_from(wire: v1::ProtocolRange) -> Result<Self, ConvertError> {
        let range = Self { min: narrow(wire.min, "protocol.min")?, max: narrow(wire.max, "protocol.max")? };
        if range.min > range.max { Err(ConvertError::range("protocol", range)) } else { Ok(range) }
    }
}

impl From<&NodeInfo> for v1::NodeInfo {
    fn from(node: &NodeInfo) -> Self {
        Self {
            id: node.id.to_string(),
            epoch: node.epoch.0,
            role: v1::Role::from(node.role).into(),
            pid: node.pid,
            host: node.host.clone(),
            address: node.address.clone(),
            admin: node.admin.clone(),
            wires: node.wires.iter().map(Into::into).collect(),
            model: Some((&node.model).into()),
            protocol: Some(node.protocol.into()),
            without: node.without.iter().map(Into::into).collect(),
            keeps_role: node.keeps_role,
        }
    }
}

impl TryFrom<v1::NodeInfo> for NodeInfo {
    type Error = ConvertError;

    fn try_from(wire: v1::NodeInfo) -> Result<Self, ConvertError> {
        if wire.id.is_empty() {
            return Err(ConvertError::Missing { field: "node.id" });
        }
        if wire.address.is_empty() {
            return Err(ConvertError::Missing { field: "node.address" });
        }
        Ok(Self {
            id: NodeId::new(wire.id),
            epoch: Epoch(wire.epoch),
            role: role_from_wire(wire.role)?,
            pid: wire.pid,
            host: wire.host,
            address: wire.address,
            admin: wire.admin,
            wires: wire.wires.into_iter().map(Into::into).collect(),
            without: wire.without.into_iter().map(Into::into).collect(),
            model: present(wire.model, "node.model")?.try_into()?,
            protocol: present(wire.protocol, "node.protocol")?.try_into()?,
            keeps_role: wire.keeps_role,
        })
    }
}

impl From<&MissingWire> for v1::MissingWire {
    fn from(missing: &MissingWire) -> Self {
        Self { scheme: missing.scheme.to_string(), why: missing.why.clone() }
    }
}

impl From<v1::MissingWire> for MissingWire {
    fn from(wire: v1::MissingWire) -> Self {
        Self { scheme: Scheme::new(wire.scheme), why: wire.why }
    }
}

impl From<Role> for v1::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Prefill => Self::Prefill,
            Role::Decode => Self::Decode,
            Role::Both => Self::Both,
            Role::Pool => Self::Pool,
        }
    }
}

/// Converts the number of a role.
pub fn role_from_wire(role: i32) -> Result<Role, ConvertError> {
    match v1::Role::try_from(role) {
        Ok(v1::Role::Prefill) => Ok(Role::Prefill),
        Ok(v1::Role::Decode) => Ok(Role::Decode),
        Ok(v1::Role::Both) => Ok(Role::Both),
        Ok(v1::Role::Pool) => Ok(Role::Pool),
        Ok(v1::Role::Unspecified) | Err(_) => Err(ConvertError::unknown("node.role", role)),
    }
}

impl From<&ModelInfo> for v1::ModelInfo {
    fn from(model: &ModelInfo) -> Self {
        Self {
            name: model.name.clone(),
            context_tokens: model.context_tokens,
            vocab: model.vocab,
            eos_tokens: model.eos_tokens.iter().map(|token| token.0).collect(),
            layout: Some((&model.layout).into()),
            fingerprint: Some((&model.fingerprint).into()),
        }
    }
}

impl TryFrom<v1::ModelInfo> for ModelInfo {
    type Error = ConvertError;

    fn try_from(wire: v1::ModelInfo) -> Result<Self, ConvertError> {
        Ok(Self {
            name: wire.name,
            context_tokens: wire.context_tokens,
            vocab: wire.vocab,
            eos_tokens: wire.eos_tokens.into_iter().map(TokenId).collect(),
            layout: present(wire.layout, "model.layout")?.try_into()?,
            fingerprint: present(wire.fingerprint, "model.fingerprint")?.into(),
        })
    }
}
