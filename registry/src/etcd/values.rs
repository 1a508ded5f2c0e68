//! The values of all keys with a prefix, for lists that other programs keep in etcd.
//!
//! etcd removes a key that was put with a lease when the lease ends. The values are not signed, so every program that may
//! write the keys can change the list.

use std::collections::BTreeMap;

use super::client::v3::event::EventType;
use super::client::v3::{KeyValue, WatchResponse};
use super::prefix_watch::{Operations, PrefixWatch};
use super::settings::EtcdSettings;
use crate::announcement::within;
use crate::error::RegistryError;

const OPERATIONS: Operations = Operations {
    read: "read the keys in etcd",
    open: "watch the keys in etcd",
    follow: "watch the keys in etcd",
};

/// Follows the values of all keys with a prefix. Dropping it ends the watch.
#[derive(Debug)]
pub struct EtcdValues {
    settings: EtcdSettings,
    prefix: String,
    watch: Option<PrefixWatch>,
    values: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl EtcdValues {
    /// Follows the keys below `/baton/<cluster>/<name>/`, where `<cluster>` is the one of the settings. Reads the
    /// certificates, so that a missing file is reported at once.
    pub fn new(settings: EtcdSettings, name: &str) -> Result<Self, RegistryError> {
        settings.check()?;
        let prefix = format!("/baton/{}/{name}/", settings.cluster);
        Ok(Self { settings, prefix, watch: None, values: BTreeMap::new() })
    }

    /// Returns all values in the order of their keys: at once the first time and after an error, then after each change.
    ///
    /// After an error the next call connects again and reads everything. The caller waits in between.
    pub async fn next(&mut self) -> Result<Vec<Vec<u8>>, RegistryError> {
        match &mut self.watch {
            None => {
                let opened = PrefixWatch::open(&self.settings, &self.prefix, OPERATIONS);
                let (state, watch) = within(OPERATIONS.read, opened).await?;
                let entries = state.kvs.into_iter().map(|entry| (entry.key.to_vec(), entry.value.to_vec()));
                (self.values, self.watch) = (entries.collect(), Some(watch));
            }
            Some(watch) => match watch.next(OPERATIONS).await {
                Ok(heard) => self.apply(heard),
                Err(error) => {
                    self.watch = None;
                    return Err(error);
                }
            },
        }
        Ok(self.values.values().cloned().collect())
    }

    fn apply(&mut self, heard: WatchResponse) {
        for event in heard.events {
            let kind = event.r#type();
            let Some(KeyValue { key, value, .. }) = event.kv else { continue };
            match kind {
                EventType::Put => drop(self.values.insert(key.to_vec(), value.to_vec())),
                EventType::Delete => drop(self.values.remove(&key[..])),
            }
        }
    }
}
