//! The parts of a kubeconfig that identify its cluster: server, authority and client certificate.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use serde_json::Value;

/// A value that a kubeconfig contains or that is in a file that it names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Material {
    Inline(Vec<u8>),
    File(PathBuf),
}

/// Server, authority and client certificate of the current context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KubeconfigFacts {
    pub(super) server: String,
    pub(super) authority: Option<Material>,
    pub(super) certificate: Option<Material>,
    pub(super) key: Option<Material>,
    /// The user has a token, a plugin or another credential without a certificate.
    pub(super) has_other_credential: bool,
}

/// The part of a kubeconfig that is missing or invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum KubeconfigProblem {
    #[error("is not valid YAML")]
    NotYaml,
    #[error("has no {kind} {name}")]
    Absent { kind: &'static str, name: String },
    #[error("has no server in its cluster")]
    NoServer,
    #[error("has no credential in its user")]
    NoCredential,
    #[error("has {0} that is not valid base64")]
    NotBase64(&'static str),
}

/// Parses the kubeconfig at `path`, to whose directory relative paths in it are relative.
pub(super) fn parse(text: &str, path: &Path) -> Result<KubeconfigFacts, KubeconfigProblem> {
    // The parser's message may quote the file.
    let whole: Value = serde_saphyr::from_str(text).map_err(|_| KubeconfigProblem::NotYaml)?;
    let find = |list: &str, name: &Value, kind: &'static str| {
        let named = whole[list].as_array().into_iter().flatten().find(|item| item["name"] == *name);
        let absent = || KubeconfigProblem::Absent {
            kind,
            name: name
                .as_str()
                .map_or_else(|| "of the current context".to_owned(), |name| format!("{name:?}")),
        };
        named.map(|item| item[kind].clone()).ok_or_else(absent)
    };
    let context = find("contexts", &whole["current-context"], "context")?;
    let cluster = find("clusters", &context["cluster"], "cluster")?;
    let user = find("users", &context["user"], "user")?;
    let server = cluster["server"].as_str().filter(|server| !server.is_empty());
    let beside = path.parent().unwrap_or(Path::new("/"));
    let material = |of_object: &Value, file: &str, data: &'static str| {
        let present =
            |name: &str| of_object[name].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        if let Some(encoded) = present(data) {
            let bytes = base64::engine::general_purpose::STANDARD.decode(encoded);
            return bytes
                .map(|bytes| Some(Material::Inline(bytes)))
                .map_err(|_| KubeconfigProblem::NotBase64(data));
        }
        Ok(present(file).map(|named| Material::File(beside.join(named))))
    };
    let facts = KubeconfigFacts {
        server: server.ok_or(KubeconfigProblem::NoServer)?.to_owned(),
        authority: material(&cluster, "certificate-authority", "certificate-authority-data")?,
        certificate: material(&user, "client-certificate", "client-certificate-data")?,
        key: material(&user, "client-key", "client-key-data")?,
        has_other_credential: ["token", "tokenFile", "exec", "username", "auth-provider"]
            .iter()
            .any(|field| !user[*field].is_null()),
    };
    if facts.certificate.is_none() && !facts.has_other_credential {
        return Err(KubeconfigProblem::NoCredential);
    }
    Ok(facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "current-context: x\ncontexts: [{name: x, context: {cluster: c, user: u}}]\n\
                         clusters: [{name: c, cluster: {server: \"https://s\", certificate-authority-data: Q0E=}}]\n\
                         users: [{name: u, user: {client-certificate: pki/c.pem, client-key: /k.pem}}]\n";

    #[test]
    fn data_and_files_of_the_current_context_are_found() {
        let facts = parse(WHOLE, Path::new("/etc/kubernetes/kubelet.conf")).unwrap();
        assert_eq!(facts.server, "https://s");
        assert_eq!(facts.authority, Some(Material::Inline(b"CA".to_vec())));
        assert_eq!(facts.certificate, Some(Material::File("/etc/kubernetes/pki/c.pem".into())));
        assert_eq!(facts.key, Some(Material::File("/k.pem".into())));
    }

    #[test]
    fn each_missing_part_is_named() {
        for (old, new, want) in [
            (WHOLE, "{", "is not valid YAML"),
            ("current-context: x", "current-context: z", "has no context \"z\""),
            ("current-context: x\n", "", "has no context of the current context"),
            ("cluster: c,", "cluster: d,", "has no cluster \"d\""),
            ("user: u}}", "user: v}}", "has no user \"v\""),
            ("server: \"https://s\", ", "", "has no server in its cluster"),
            ("client-certificate: pki/c.pem, ", "", "has no credential in its user"),
            ("Q0E=", "\"?\"", "has certificate-authority-data that is not valid base64"),
        ] {
            let problem = parse(&WHOLE.replace(old, new), Path::new("/k")).unwrap_err();
            assert_eq!(problem.to_string(), want);
        }
        let token = WHOLE.replace("client-certificate: pki/c.pem, client-key: /k.pem", "token: t");
        assert!(parse(&token, Path::new("/k")).unwrap().has_other_credential);
    }
}
