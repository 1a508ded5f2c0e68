//! Conversions for landings and destinations.

use bytes::Bytes;
use types::layout::{Attention, KvDtype, LayerGroup, LayerShape, RANKS_MAX, Shard};
use types::{
    BlockIdx, Destination, Epoch, Fingerprint, Grant, KvLayout, Landing, NodeId, Scheme, TransferId,
    WireAddress,
};

use super::{narrow, present, sixteen};
use crate::error::ConvertError;
use crate::v1;
use crate::v1::prefill_request;

/// The most blocks of a landing in one group: 2^24, for a quarter of a billion tokens.
const TABLE_BLOCKS_MAX: usize = 1 << 24;
const GROUPS_MAX: usize = 64;
const LAYERS_MAX: usize = 4096;

impl From<&Landing> for v1::Landing {
    fn from(landing: &Landing) -> Self {
        let table =
            |table: &Vec<BlockIdx>| v1::BlockTable { blocks: table.iter().map(|block| block.0).collect() };
        Self {
            transfer: transfer_to_wire(landing.transfer),
            node: landing.node.to_string(),
            epoch: landing.epoch.0,
            grant: landing.grant.to_bytes().to_vec().into(),
            wire: Some((&landing.wire).into()),
            n_tokens: landing.n_tokens,
            held_tokens: landing.held_tokens,
            tables: landing.tables.iter().map(table).collect(),
            layout: Some((&landing.layout).into()),
            fingerprint: Some((&landing.fingerprint).into()),
            bound: landing.bound,
        }
    }
}

impl TryFrom<v1::Landing> for Landing {
    type Error = ConvertError;

    fn try_from(wire: v1::Landing) -> Result<Self, ConvertError> {
        let landing = Self {
            transfer: transfer_from_wire(&wire.transfer, "landing.transfer")?,
            node: NodeId::new(wire.node),
            epoch: Epoch(wire.epoch),
            grant: Grant::from_bytes(sixteen(&wire.grant, "landing.grant")?),
            bound: wire.bound,
            wire: present(wire.wire, "landing.wire")?.into(),
            n_tokens: wire.n_tokens,
            held_tokens: wire.held_tokens,
            tables: wire.tables.into_iter().map(block_table).collect(),
            layout: present(wire.layout, "landing.layout")?.try_into()?,
            fingerprint: present(wire.fingerprint, "landing.fingerprint")?.into(),
        };
        consistent(&landing)?;
        Ok(landing)
    }
}

/// Encodes a transfer id: 16 bytes, big-endian.
pub fn transfer_to_wire(transfer: TransferId) -> Bytes {
    Bytes::copy_from_slice(&transfer.0.to_be_bytes())
}

pub fn transfer_from_wire(wire: &[u8], field: &'static str) -> Result<TransferId, ConvertError> {
    Ok(TransferId(u128::from_be_bytes(sixteen(wire, field)?)))
}

fn block_table(wire: v1::BlockTable) -> Vec<BlockIdx> {
    wire.blocks.into_iter().map(BlockIdx).collect()
}

/// Refuses a landing whose fields contradict each other, so that later arithmetic on it cannot fail.
fn consistent(landing: &Landing) -> Result<(), ConvertError> {
    let block_tokens = u32::from(landing.layout.block_tokens);
    if landing.n_tokens == 0 {
        return Err(ConvertError::range("landing.n_tokens", 0));
    }
    if landing.held_tokens > landing.n_tokens || !landing.held_tokens.is_multiple_of(block_tokens) {
        return Err(ConvertError::range("landing.held_tokens", landing.held_tokens));
    }
    if landing.tables.len() != landing.layout.groups.len() {
        return Err(ConvertError::range("landing.tables", landing.tables.len()));
    }
    let needed = landing.layout.blocks_for(landing.n_tokens as usize);
    match landing.tables.iter().find(|table| table.len() < needed || table.len() > TABLE_BLOCKS_MAX) {
        Some(table) => Err(ConvertError::range("landing.tables", format!("{} blocks", table.len()))),
        None => Ok(()),
    }
}

impl From<&WireAddress> for v1::WireAddress {
    fn from(address: &WireAddress) -> Self {
        let WireAddress { scheme, endpoint, within_host } = address;
        Self { scheme: scheme.to_string(), endpoint: endpoint.clone(), within_host: *within_host }
    }
}

impl From<v1::WireAddress> for WireAddress {
    fn from(wire: v1::WireAddress) -> Self {
        Self { scheme: Scheme::new(wire.scheme), endpoint: wire.endpoint, within_host: wire.within_host }
    }
}

impl From<&Fingerprint> for v1::Fingerprint {
    fn from(fingerprint: &Fingerprint) -> Self {
        Self { parts: fingerprint.parts().map(|(name, value)| (name.to_owned(), value.to_owned())).collect() }
    }
}

impl From<v1::Fingerprint> for Fingerprint {
    fn from(wire: v1::Fingerprint) -> Self {
        Self::new(wire.parts)
    }
}

impl From<&KvLayout> for v1::KvLayout {
    fn from(layout: &KvLayout) -> Self {
        Self {
            block_tokens: layout.block_tokens.into(),
            dtype: layout.dtype.as_str().to_owned(),
            groups: layout.groups.iter().map(group_to_wire).collect(),
            shard: Some(shard_to_wire(layout.shard)),
        }
    }
}

impl TryFrom<v1::KvLayout> for KvLayout {
    type Error = ConvertError;

    fn try_from(wire: v1::KvLayout) -> Result<Self, ConvertError> {
        let block_tokens: u16 = narrow(wire.block_tokens, "layout.block_tokens")?;
        if block_tokens == 0 {
            return Err(ConvertError::range("layout.block_tokens", 0));
        }
        if wire.groups.is_empty() || wire.groups.len() > GROUPS_MAX {
            return Err(ConvertError::range("layout.groups", wire.groups.len()));
        }
        Ok(Self {
            block_tokens,
            dtype: dtype_from_wire(&wire.dtype)?,
            groups: wire.groups.into_iter().map(group_from_wire).collect::<Result<_, _>>()?,
            shard: shard_from_wire(present(wire.shard, "layout.shard")?)?,
        })
    }
}

fn dtype_from_wire(name: &str) -> Result<KvDtype, ConvertError> {
    [KvDtype::F32, KvDtype::Bf16, KvDtype::F16, KvDtype::Fp8E4m3]
        .into_iter()
        .find(|dtype| dtype.as_str() == name)
        .ok_or_else(|| ConvertError::unknown("layout.dtype", name))
}

fn group_to_wire(group: &LayerGroup) -> v1::LayerGroup {
    let (attention, window_tokens) = match group.attention {
        Attention::Full => (v1::Attention::Full, 0),
        Attention::SlidingWindow { tokens } => (v1::Attention::SlidingWindow, tokens),
        Attention::Latent => (v1::Attention::Latent, 0),
    };
    let layers = group.layers.iter().map(|shape| v1::LayerShape {
        layer: shape.layer.into(),
        n_kv_heads: shape.n_kv_heads.into(),
        head_dim: shape.head_dim.into(),
    });
    v1::LayerGroup { attention: attention.into(), window_tokens, layers: layers.collect() }
}

fn group_from_wire(wire: v1::LayerGroup) -> Result<LayerGroup, ConvertError> {
    let attention = match v1::Attention::try_from(wire.attention) {
        Ok(v1::Attention::Full) => Attention::Full,
        Ok(v1::Attention::SlidingWindow) => Attention::SlidingWindow { tokens: wire.window_tokens },
        Ok(v1::Attention::Latent) => Attention::Latent,
        Ok(v1::Attention::Unspecified) | Err(_) => {
            return Err(ConvertError::unknown("layout.group.attention", wire.attention));
        }
    };
    if wire.layers.len() > LAYERS_MAX {
        return Err(ConvertError::range("layout.group.layers", wire.layers.len()));
    }
    Ok(LayerGroup {
        attention,
        layers: wire.layers.into_iter().map(layer_from_wire).collect::<Result<_, _>>()?,
    })
}

fn layer_from_wire(wire: v1::LayerShape) -> Result<LayerShape, ConvertError> {
    Ok(LayerShape {
        layer: narrow(wire.layer, "layout.layer")?,
        n_kv_heads: narrow(wire.n_kv_heads, "layout.layer.n_kv_heads")?,
        head_dim: narrow(wire.head_dim, "layout.layer.head_dim")?,
    })
}

fn shard_to_wire(shard: Shard) -> v1::Shard {
    v1::Shard { stage: shard.stage.into(), n_stages: shard.n_stages.into(), tp_size: shard.tp_size.into() }
}

fn shard_from_wire(wire: v1::Shard) -> Result<Shard, ConvertError> {
    let shard = Shard {
        stage: narrow(wire.stage, "shard.stage")?,
        n_stages: narrow(wire.n_stages, "shard.n_stages")?,
        tp_size: narrow(wire.tp_size, "shard.tp_size")?,
    };
    if shard.stage >= shard.n_stages {
        return Err(ConvertError::range("shard.stage", shard.stage));
    }
    if !(1..=RANKS_MAX).contains(&shard.tp_size) {
        return Err(ConvertError::range("shard.tp_size", shard.tp_size));
    }
    Ok(shard)
}

impl From<&Destination> for prefill_request::Destination {
    fn from(destination: &Destination) -> Self {
        match destination {
            Destination::Landing(landing) => Self::Landing(landing.into()),
            Destination::Held(transfer) => Self::Held(v1::Held { transfer: transfer_to_wire(*transfer) }),
        }
    }
}

impl TryFrom<prefill_request::Destination> for Destination {
    type Error = ConvertError;

    fn try_from(wire: prefill_request::Destination) -> Result<Self, ConvertError> {
        Ok(match wire {
            prefill_request::Destination::Landing(landing) => Self::Landing(landing.try_into()?),
            prefill_request::Destination::Held(held) => {
                Self::Held(transfer_from_wire(&held.transfer, "held.transfer")?)
            }
        })
    }
}
