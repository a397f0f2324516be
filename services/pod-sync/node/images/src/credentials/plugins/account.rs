//! The service account of a pod, for a plugin that uses it.

use std::collections::BTreeMap;

use pod_sync_node_decisions::image_access::ImagePullServiceAccount;
use serde_json::json;

/// A pod's service account, for a plugin that uses it.
#[derive(Clone, Default)]
pub struct PluginAccount {
    /// A token for the plugin's audience.
    pub token: String,
    /// Namespace, name and UID of the service account.
    pub account: ImagePullServiceAccount,
    /// Annotations that the plugin requested.
    pub annotations: BTreeMap<String, String>,
}

impl PluginAccount {
    // Cache key of the account. Other annotations make another key.
    pub(super) fn key(&self) -> String {
        let ImagePullServiceAccount { uid, namespace, name } = &self.account;
        let annotations = json!(self.annotations);
        format!("{namespace}/{name}\0{uid}\0{annotations}")
    }
}
