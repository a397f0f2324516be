//! Answers of the API server, by what was asked.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Secret, Service};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use pod_sync_layout::{Token, TokenKey};
use serde::{Deserialize, Serialize};

/// A question to the API server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum AnswerKey {
    /// A ConfigMap, by namespace and name.
    ConfigMap(String, String),
    /// A Secret, by namespace and name.
    Secret(String, String),
    /// The Services of a namespace.
    Services(String),
    /// The handler of a RuntimeClass, by its name.
    RuntimeClass(String),
    /// The annotations of a service account, by namespace and name.
    ServiceAccount(String, String),
    /// A PersistentVolumeClaim, by namespace and name.
    Claim(String, String),
    /// A PersistentVolume, by name.
    Volume(String),
    /// A CSIDriver, by name.
    Driver(String),
    /// A VolumeAttachment, by name.
    Attachment(String),
    /// The data of a Secret that a volume refers to, by namespace and name.
    VolumeSecret(String, String),
    /// A ClusterTrustBundle, by name.
    TrustBundle(String),
    /// The ClusterTrustBundles of a signer that a selector matches.
    TrustBundles(String, String),
    /// A service account token.
    Token(TokenId),
}

/// Identity of a token, as [`TokenKey`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TokenId {
    namespace: String,
    service_account: String,
    audiences: Vec<String>,
    expiration_seconds: i64,
    /// UID of the pod that the token is bound to.
    pub(crate) pod_uid: String,
}

impl From<&TokenKey> for TokenId {
    fn from(key: &TokenKey) -> Self {
        Self {
            namespace: key.namespace.clone(),
            service_account: key.service_account.clone(),
            audiences: key.audiences.clone(),
            expiration_seconds: key.expiration_seconds,
            pod_uid: key.pod_uid.clone(),
        }
    }
}

/// A value that is kept as JSON.
pub(crate) trait Answer: Sized {
    /// Returns a text that changes with the value; empty if there is none.
    fn version(&self) -> String;

    fn encode(&self) -> serde_json::Result<String>;

    fn decode(json: &str) -> serde_json::Result<Self>;
}

fn version_of(meta: &ObjectMeta) -> String {
    match (&meta.uid, &meta.resource_version) {
        (Some(uid), Some(version)) => format!("{uid} {version}"),
        (None, _) | (_, None) => String::new(),
    }
}

fn encode_object<T: Serialize + Clone>(
    object: &T,
    meta: impl Fn(&mut T) -> &mut ObjectMeta,
) -> serde_json::Result<String> {
    let mut object = object.clone();
    meta(&mut object).managed_fields = None;
    serde_json::to_string(&object)
}

macro_rules! objects {
    ($($kind:ty),*) => {$(
        impl Answer for $kind {
            fn version(&self) -> String {
                version_of(&self.metadata)
            }
            fn encode(&self) -> serde_json::Result<String> {
                encode_object(self, |object| &mut object.metadata)
            }
            fn decode(json: &str) -> serde_json::Result<Self> {
                serde_json::from_str(json)
            }
        }
    )*};
}

objects!(ConfigMap, Secret, PersistentVolumeClaim, PersistentVolume, CSIDriver, VolumeAttachment);

impl<T: Answer> Answer for Arc<T> {
    fn version(&self) -> String {
        T::version(self)
    }

    fn encode(&self) -> serde_json::Result<String> {
        T::encode(self)
    }

    fn decode(json: &str) -> serde_json::Result<Self> {
        T::decode(json).map(Self::new)
    }
}

// Values without a version, which are compared as a whole.
macro_rules! unversioned {
    ($($kind:ty),*) => {$(
        impl Answer for $kind {
            fn version(&self) -> String {
                String::new()
            }
            fn encode(&self) -> serde_json::Result<String> {
                serde_json::to_string(self)
            }
            fn decode(json: &str) -> serde_json::Result<Self> {
                serde_json::from_str(json)
            }
        }
    )*};
}

unversioned!(String, BTreeMap<String, String>);

/// Services with what environment variables are made from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Services(pub(crate) Vec<Arc<Service>>);

impl Answer for Services {
    fn version(&self) -> String {
        String::new()
    }

    fn encode(&self) -> serde_json::Result<String> {
        serde_json::to_string(&self.0)
    }

    fn decode(json: &str) -> serde_json::Result<Self> {
        serde_json::from_str(json).map(Self)
    }
}

/// The form of a token.
#[derive(Serialize, Deserialize)]
struct TokenForm {
    token: String,
    expires: Timestamp,
    expiration_seconds: i64,
}

impl Answer for Token {
    fn version(&self) -> String {
        String::new()
    }

    fn encode(&self) -> serde_json::Result<String> {
        let Self { token, expires, expiration_seconds } = self;
        let form =
            TokenForm { token: token.clone(), expires: *expires, expiration_seconds: *expiration_seconds };
        serde_json::to_string(&form)
    }

    fn decode(json: &str) -> serde_json::Result<Self> {
        let TokenForm { token, expires, expiration_seconds } = serde_json::from_str(json)?;
        Ok(Self { token, expires, expiration_seconds })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_is_the_same_after_it_was_kept() {
        let service: Service = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "a"},
            "spec": {"clusterIP": "10.0.0.1", "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]},
        }))
        .unwrap();
        let services = Services(vec![Arc::new(service)]);
        assert_eq!(Services::decode(&services.encode().unwrap()).unwrap(), services);

        let token = Token { token: "t".to_owned(), expires: Timestamp::UNIX_EPOCH, expiration_seconds: 3607 };
        assert_eq!(Token::decode(&token.encode().unwrap()).unwrap(), token);

        let secret = json!({"metadata": {"name": "s", "uid": "u", "resourceVersion": "7",
            "managedFields": [{"manager": "m"}]}, "data": {"a": "/w=="}});
        let secret: Secret = serde_json::from_value(secret).unwrap();
        let kept = Secret::decode(&secret.encode().unwrap()).unwrap();
        assert_eq!(
            (&kept.data, kept.metadata.managed_fields, kept.metadata.name),
            (&secret.data, None, secret.metadata.name.clone())
        );
        assert_eq!(secret.version(), "u 7");
    }
}
