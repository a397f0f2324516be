//! The kubeconfig of the node: its credential, and the file that is written after a bootstrap.

use std::io;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use quintlet_kit::{atomic_file, failpoint};
use serde_json::{Value, json};

use crate::decide::KubeconfigCredential;
use crate::key::facts_of_pair;

/// Mode of a kubeconfig.
const MODE: u32 = 0o600;

/// A kubeconfig cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KubeconfigError {
    /// The file cannot be read or written.
    #[error("failed to access {}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The content is no kubeconfig with a current context.
    #[error("{} is not a usable kubeconfig: {reason}", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// The part that is missing or invalid.
        reason: String,
    },
}

/// A kubeconfig that was read.
struct Read {
    path: PathBuf,
    whole: Value,
    cluster: Value,
    user: Value,
    /// Name of the user.
    user_name: String,
}

impl Read {
    fn of(path: &Path) -> Result<Self, KubeconfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| KubeconfigError::File { path: path.to_owned(), source })?;
        let content = |reason: String| KubeconfigError::Content { path: path.to_owned(), reason };
        // The parser's message may quote the file.
        let whole: Value =
            serde_saphyr::from_str(&text).map_err(|_| content("it is not valid YAML".to_owned()))?;
        let find = |list: &str, name: &Value, inner: &str| {
            let named = whole[list].as_array().into_iter().flatten().find(|item| item["name"] == *name);
            let kind = inner;
            named.map(|item| item[inner].clone()).ok_or_else(|| content(format!("there is no {kind} {name}")))
        };
        let context = find("contexts", &whole["current-context"], "context")?;
        let (cluster, user) =
            (find("clusters", &context["cluster"], "cluster")?, find("users", &context["user"], "user")?);
        if cluster["server"].as_str().is_none_or(str::is_empty) {
            return Err(content("the cluster has no server".to_owned()));
        }
        let user_name = context["user"].as_str().unwrap_or_default().to_owned();
        Ok(Self { path: path.to_owned(), whole, cluster, user, user_name })
    }

    /// Returns the text of a field that holds data or names a file; none without either.
    fn text(&self, file: &str, data: &str) -> Result<Option<String>, String> {
        if let Some(encoded) = self.user[data].as_str().filter(|encoded| !encoded.is_empty()) {
            let bytes = base64::engine::general_purpose::STANDARD.decode(encoded);
            let text = bytes.ok().and_then(|bytes| String::from_utf8(bytes).ok());
            return text.map(Some).ok_or_else(|| format!("{data} of {} is not valid", self.path.display()));
        }
        let Some(named) = self.user[file].as_str().filter(|named| !named.is_empty()) else { return Ok(None) };
        let path = self.path.parent().unwrap_or(Path::new("/")).join(named);
        let text = std::fs::read_to_string(&path);
        text.map(Some).map_err(|error| format!("failed to read {}: {error}", path.display()))
    }
}

/// Returns the credential of a kubeconfig.
pub fn credential_of(path: &Path) -> KubeconfigCredential {
    let read = match Read::of(path) {
        Ok(read) => read,
        Err(KubeconfigError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return KubeconfigCredential::NoFile;
        }
        Err(error) => return KubeconfigCredential::Unusable(quintlet_kit::error_chain(&error)),
    };
    let texts = read
        .text("client-certificate", "client-certificate-data")
        .and_then(|chain| Ok((chain, read.text("client-key", "client-key-data")?)));
    match texts {
        Ok((None, None)) => KubeconfigCredential::Other,
        Ok((Some(chain), Some(key))) => match facts_of_pair(&chain, &key) {
            Ok(facts) => KubeconfigCredential::Certificate(Box::new(facts)),
            Err(error) => KubeconfigCredential::Unusable(format!(
                "client certificate of {}: {}",
                path.display(),
                quintlet_kit::error_chain(&error)
            )),
        },
        Ok((Some(_), None)) => {
            KubeconfigCredential::Unusable(format!("{} has a client certificate and no key", path.display()))
        }
        Ok((None, Some(_))) => {
            KubeconfigCredential::Unusable(format!("{} has a client key and no certificate", path.display()))
        }
        Err(error) => KubeconfigCredential::Unusable(error),
    }
}

/// Writes the kubeconfig of a node that was bootstrapped: the cluster of the bootstrap kubeconfig, with the
/// certificate at `pem` (`pkg/kubelet/certificate/bootstrap: writeKubeconfigFromBootstrapping`).
pub(crate) fn write_bootstrapped(bootstrap: &Path, path: &Path, pem: &Path) -> Result<(), KubeconfigError> {
    let read = Read::of(bootstrap)?;
    let mut cluster = json!({"server": read.cluster["server"]});
    let beside = bootstrap.parent().unwrap_or(Path::new("/"));
    match read.cluster["certificate-authority"].as_str().filter(|named| !named.is_empty()) {
        Some(named) => cluster["certificate-authority"] = json!(beside.join(named)),
        None => {
            let data = &read.cluster["certificate-authority-data"];
            if data.is_string() {
                cluster["certificate-authority-data"] = data.clone();
            }
        }
    }
    // Without these the node could not reach a server that the bootstrap has reached. A kubelet drops all but
    // the first.
    for field in ["insecure-skip-tls-verify", "tls-server-name", "proxy-url"] {
        if !read.cluster[field].is_null() {
            cluster[field] = read.cluster[field].clone();
        }
    }
    write(
        path,
        &json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "default-cluster", "cluster": cluster}],
            "contexts": [{"name": "default-context", "context":
                {"cluster": "default-cluster", "namespace": "default", "user": "default-auth"}}],
            "current-context": "default-context",
            "users": [{"name": "default-auth", "user": {"client-certificate": pem, "client-key": pem}}],
        }),
    )
}

/// Makes a kubeconfig name the certificate at `pem`, as `kubeadm init` does at its end. Returns whether it
/// changed. All other fields are kept.
pub(crate) fn point_to(path: &Path, pem: &Path) -> Result<bool, KubeconfigError> {
    let mut read = Read::of(path)?;
    let is_named = |field: &str| read.user[field].as_str().is_some_and(|named| Path::new(named) == pem);
    let has_data = ["client-certificate-data", "client-key-data"]
        .iter()
        .any(|field| read.user[*field].as_str().is_some_and(|data| !data.is_empty()));
    if is_named("client-certificate") && is_named("client-key") && !has_data {
        return Ok(false);
    }
    for item in read.whole["users"].as_array_mut().into_iter().flatten() {
        if item["name"].as_str() == Some(read.user_name.as_str())
            && let Some(user) = item["user"].as_object_mut()
        {
            user.remove("client-certificate-data");
            user.remove("client-key-data");
            user.insert("client-certificate".to_owned(), json!(pem));
            user.insert("client-key".to_owned(), json!(pem));
        }
    }
    write(path, &read.whole)?;
    Ok(true)
}

/// Fields that name a file: list, inner object, field, and field for the content of the file.
const FILES: [(&str, &str, &str, &str); 3] = [
    ("clusters", "cluster", "certificate-authority", "certificate-authority-data"),
    ("users", "user", "client-certificate", "client-certificate-data"),
    ("users", "user", "client-key", "client-key-data"),
];

/// Returns the text of a kubeconfig that contains the certificates, keys and tokens of the files that it
/// names.
pub(crate) fn inlined(path: &Path) -> Result<String, KubeconfigError> {
    let mut whole = Read::of(path)?.whole;
    let beside = path.parent().unwrap_or(Path::new("/"));
    for (list, inner, file, data) in FILES {
        for item in whole[list].as_array_mut().into_iter().flatten() {
            let Some(fields) = item[inner].as_object_mut() else { continue };
            let Some(Value::String(named)) = fields.remove(file) else { continue };
            let named = beside.join(named);
            let bytes = std::fs::read(&named)
                .map_err(|source| KubeconfigError::File { path: named.clone(), source })?;
            let encoded = base64::engine::general_purpose::STANDARD.encode(bytes);
            fields.insert(data.to_owned(), encoded.into());
        }
    }
    for item in whole["users"].as_array_mut().into_iter().flatten() {
        let Some(user) = item["user"].as_object_mut() else { continue };
        let Some(Value::String(named)) = user.remove("tokenFile") else { continue };
        let named = beside.join(named);
        let token = std::fs::read_to_string(&named)
            .map_err(|source| KubeconfigError::File { path: named.clone(), source })?;
        user.insert("token".to_owned(), token.trim().into());
    }
    text_of(path, &whole)
}

fn text_of(path: &Path, config: &Value) -> Result<String, KubeconfigError> {
    serde_saphyr::to_string(config)
        .map_err(|error| KubeconfigError::Content { path: path.to_owned(), reason: error.to_string() })
}

fn write(path: &Path, config: &Value) -> Result<(), KubeconfigError> {
    let text = text_of(path, config)?;
    let failed = |source| KubeconfigError::File { path: path.to_owned(), source };
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    failpoint::file!("kubeconfig written", || atomic_file::write_durable(path, text.as_bytes(), MODE))
        .map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::decide::WantedCertificate;
    use crate::key::NodeKey;
    use crate::tests::self_signed;

    const BOOTSTRAP: &str = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
        clusters: [{name: k, cluster: {server: \"https://10.0.0.1:6443\", certificate-authority: ca.crt}}]\n\
        contexts: [{name: c, context: {cluster: k, user: u}}]\nusers: [{name: u, user: {token: abcdef.secret}}]\n";

    #[test]
    fn the_written_kubeconfig_names_the_certificate_and_has_no_token() {
        let dir = tempfile::tempdir().unwrap();
        let [bootstrap, path] = ["bootstrap.conf", "etc/kubelet.conf"].map(|name| dir.path().join(name));
        std::fs::write(&bootstrap, BOOTSTRAP).unwrap();
        let key = NodeKey::generate().unwrap();
        let pem = dir.path().join("current.pem");
        std::fs::write(&pem, self_signed(&key, &WantedCertificate::client("n1")) + key.expose()).unwrap();
        write_bootstrapped(&bootstrap, &path, &pem).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains("secret") && !text.starts_with('{'), "{text}");
        let read = Read::of(&path).unwrap();
        assert_eq!(
            read.cluster,
            json!({"server": "https://10.0.0.1:6443", "certificate-authority": dir.path().join("ca.crt")})
        );
        assert_eq!(read.user, json!({"client-certificate": pem, "client-key": pem}));
        assert_eq!(read.whole["current-context"], "default-context");
        let KubeconfigCredential::Certificate(facts) = credential_of(&path) else { panic!("{text}") };
        assert_eq!(facts.common_name, "system:node:n1");
        assert!(!point_to(&path, &pem).unwrap(), "it names the file already");
    }

    #[test]
    fn data_in_a_kubeconfig_is_replaced_by_the_file_and_the_rest_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubelet.conf");
        let key = NodeKey::generate().unwrap();
        let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        let data = encode(&self_signed(&key, &WantedCertificate::client("n1")));
        let user = format!("{{client-certificate-data: {data}, client-key-data: {}}}", encode(key.expose()));
        let text = BOOTSTRAP
            .replace("{token: abcdef.secret}", &user)
            .replace("[{name: u,", "[{name: o, user: {token: t}}, {name: u,");
        std::fs::write(&path, &text).unwrap();
        assert!(matches!(credential_of(&path), KubeconfigCredential::Certificate(_)));
        let pem = Path::new("/pki/current.pem");
        assert!(point_to(&path, pem).unwrap());
        let read = Read::of(&path).unwrap();
        assert_eq!(read.user, json!({"client-certificate": pem, "client-key": pem}));
        assert_eq!(read.whole["users"][0], json!({"name": "o", "user": {"token": "t"}}));
        assert_eq!(read.cluster["certificate-authority"], "ca.crt");
    }

    #[test]
    fn each_unusable_kubeconfig_has_its_reason_without_a_credential() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k");
        assert_eq!(credential_of(&path), KubeconfigCredential::NoFile);
        let user = |user: &str| BOOTSTRAP.replace("{token: abcdef.secret}", user);
        for (text, reason) in [
            (String::new(), "there is no context null"),
            ("a: [secret".to_owned(), "it is not valid YAML"),
            (BOOTSTRAP.replace("current-context: c", "current-context: d"), "there is no context \"d\""),
            (BOOTSTRAP.replace("cluster: k,", "cluster: x,"), "there is no cluster \"x\""),
            (BOOTSTRAP.replace("user: u}", "user: x}"), "there is no user \"x\""),
            (BOOTSTRAP.replace("https://10.0.0.1:6443", ""), "the cluster has no server"),
            (user("{client-certificate: none.pem, client-key: none.pem}"), "none.pem: No such file"),
            (user("{client-certificate-data: secret!, client-key-data: AA==}"), "client-certificate-data of"),
            (user("{client-certificate-data: AAAA}"), "has a client certificate and no key"),
            (user("{client-key-data: AAAA}"), "has a client key and no certificate"),
            (user("{client-certificate-data: AAAA, client-key-data: AAAA}"), "there is no certificate"),
        ] {
            std::fs::write(&path, &text).unwrap();
            let KubeconfigCredential::Unusable(found) = credential_of(&path) else { panic!("{text}") };
            assert!(found.contains(reason) && !found.contains("secret"), "{found}\n{text}");
        }
        std::fs::write(&path, BOOTSTRAP).unwrap();
        assert_eq!(credential_of(&path), KubeconfigCredential::Other);
    }
}
