//! Continuation of paged lists.

use base64::Engine;
use serde_json::json;

/// Token of the next page of a list.
pub(super) struct ContinueToken {
    pub(super) rv: u64,
    pub(super) key: (String, String),
}

impl ContinueToken {
    pub(super) fn encode(&self) -> String {
        base64::engine::general_purpose::URL_SAFE_NO_PAD
            .encode(json!([self.rv, self.key.0, self.key.1]).to_string())
    }

    pub(super) fn decode(text: &str) -> Option<Self> {
        let bytes = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(text).ok()?;
        let (rv, namespace, name) = serde_json::from_slice(&bytes).ok()?;
        Some(Self { rv, key: (namespace, name) })
    }
}
