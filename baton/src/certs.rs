//! `baton certs`: a CA and certificates for the processes of a cluster, for first steps.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use chassis::World;
use chassis::identity::{CertName, CertRole, TlsPem};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, SanType, date_time_ymd,
};

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self, PemObject as _};

use crate::cli::CertsArgs;
use crate::exit::CommandError;
use crate::output;

/// The subject of a CA, before the cluster's name.
const CA_OF: &str = "CA of the cluster ";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The validity of the CA.
const CA_DAYS: u32 = 3650;
/// The roles that get a certificate if none is named.
const ROLES: [CertRole; 6] = [
    CertRole::Router,
    CertRole::Prefill,
    CertRole::Decode,
    CertRole::Pool,
    CertRole::Registry,
    CertRole::Operator,
];

/// A CA that signs certificates of one cluster.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    cluster: String,
    now: Duration,
}

/// The reason why a certificate cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CertsError {
    #[error("{0:?} is not a name: use letters, digits, '-', '_' or '.'")]
    Name(String),
    #[error("{0:?} is not ROLE or ROLE/NODE, with one of the roles {roles}", roles = roles())]
    Process(String),
    #[error("make a certificate")]
    Make(#[from] rcgen::Error),
    #[error("write {}", file.display())]
    Write { file: PathBuf, source: io::Error },
    #[error("read {}", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("read the CA in {}", file.display())]
    Ca { file: PathBuf, source: pem::Error },
    #[error(
        "{} is the CA of {found:?}, not of the cluster {cluster:?}: peers would refuse what it signs. Set --cluster to \
         the CA's cluster, or use another folder", file.display()
    )]
    OtherCluster { file: PathBuf, found: String, cluster: String },
    #[error("{} is there already: nothing is overwritten", .0.display())]
    Exists(PathBuf),
}

fn roles() -> String {
    CertRole::ALL.map(CertRole::as_str).join(", ")
}

/// Makes all files, or none that is there already.
pub(crate) fn run(args: &CertsArgs) -> Result<ExitCode, CommandError> {
    let made = made(args).map_err(|error| match &error {
        CertsError::Name(_) | CertsError::Process(_) | CertsError::OtherCluster { .. } => {
            CommandError::usage(error)
        }
        _ => CommandError::work(error),
    })?;
    for line in made {
        output::print(&format!("{line}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn made(args: &CertsArgs) -> Result<Vec<String>, CertsError> {
    let processes: Vec<Process> = match args.processes.as_slice() {
        [] => ROLES.into_iter().map(Process::every).collect(),
        named => named.iter().map(|text| Process::parse(text)).collect::<Result<_, _>>()?,
    };
    let dir = &args.dir;
    for process in &processes {
        for ending in ["pem", "key"] {
            let file = process.file(dir, ending);
            if file.exists() {
                return Err(CertsError::Exists(file));
            }
        }
    }
    fs::create_dir_all(dir).map_err(|source| CertsError::Write { file: dir.clone(), source })?;
    let (authority, mut lines) = authority(args)?;
    for process in processes {
        let name = authority.name(&process)?;
        let TlsPem { cert, key, .. } = authority.issue(&name, &args.hosts, args.days)?;
        let (cert_file, key_file) = (process.file(dir, "pem"), process.file(dir, "key"));
        write_new(&cert_file, &cert, 0o644)?;
        write_new(&key_file, &key, 0o600)?;
        lines.push(format!("{}  {name}", cert_file.display()));
    }
    Ok(lines)
}

/// The CA in the folder, or a new one.
fn authority(args: &CertsArgs) -> Result<(Authority, Vec<String>), CertsError> {
    let (cert_file, key_file) = (args.dir.join("ca.pem"), args.dir.join("ca.key"));
    let now = World::real().unix_time();
    if key_file.exists() {
        let key =
            fs::read_to_string(&key_file).map_err(|source| CertsError::Read { file: key_file, source })?;
        let authority = Authority::with_key(&args.cluster, KeyPair::from_pem(&key)?, now)?;
        authority.check_subject(&cert_file)?;
        return Ok((authority, Vec::new()));
    }
    let authority = Authority::new(&args.cluster, now)?;
    write_new(&cert_file, authority.issuer.pem().as_bytes(), 0o644)?;
    write_new(&key_file, authority.issuer.key().serialize_pem().as_bytes(), 0o600)?;
    let line = format!("{}  the CA of the cluster {}", cert_file.display(), args.cluster);
    Ok((authority, vec![line]))
}

fn write_new(file: &Path, content: &[u8], mode: u32) -> Result<(), CertsError> {
    let opened = File::options().write(true).create_new(true).mode(mode).open(file);
    opened.and_then(|mut file| file.write_all(content)).map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => CertsError::Exists(file.to_owned()),
        _ => CertsError::Write { file: file.to_owned(), source },
    })
}

/// The process that a certificate is for.
struct Process {
    role: CertRole,
    /// `*`: every process of this role.
    node: String,
}

impl Process {
    fn every(role: CertRole) -> Self {
        Self { role, node: "*".to_owned() }
    }

    /// Parses `ROLE` or `ROLE/NODE`.
    fn parse(text: &str) -> Result<Self, CertsError> {
        let (role, node) = text.split_once('/').unwrap_or((text, "*"));
        let known = CertRole::ALL.into_iter().find(|known| known.as_str() == role);
        match known {
            Some(role) if node == "*" || is_name(node) => Ok(Self { role, node: node.to_owned() }),
            _ => Err(CertsError::Process(text.to_owned())),
        }
    }

    /// `router.pem` for every router, `prefill-a.pem` for the prefill node a.
    fn file(&self, dir: &Path, ending: &str) -> PathBuf {
        match self.node.as_str() {
            "*" => dir.join(format!("{}.{ending}", self.role.as_str())),
            node => dir.join(format!("{}-{node}.{ending}", self.role.as_str())),
        }
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

impl Authority {
    /// Makes a CA with a new key.
    pub(crate) fn new(cluster: &str, now: Duration) -> Result<Self, CertsError> {
        Self::with_key(cluster, KeyPair::generate()?, now)
    }

    /// Makes the CA of this key. Its subject depends on the cluster only, so that processes with an earlier certificate of
    /// this CA accept the certificates that it signs.
    fn with_key(cluster: &str, key: KeyPair, now: Duration) -> Result<Self, CertsError> {
        if !is_name(cluster) {
            return Err(CertsError::Name(cluster.to_owned()));
        }
        let mut params = CertificateParams::new([])?;
        params.distinguished_name = subject(&format!("{CA_OF}{cluster}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        limit(&mut params, now, CA_DAYS);
        let issuer = CertifiedIssuer::self_signed(params, key)?;
        Ok(Self { issuer, cluster: cluster.to_owned(), now })
    }

    /// Checks that the CA in `file` has this one's subject. Peers find the signer of a certificate by its subject.
    fn check_subject(&self, file: &Path) -> Result<(), CertsError> {
        let own: &Certificate = self.issuer.as_ref();
        let own = subject_of(own.der());
        let refused = |source| CertsError::Ca { file: file.to_owned(), source };
        // For a new CA of the cluster, operators append it to the file.
        let certificates: Result<Vec<_>, _> = CertificateDer::pem_file_iter(file)
            .map_err(refused)?
            .map(|found| found.map_err(refused))
            .collect();
        let subjects: Vec<String> = certificates?.iter().map(subject_of).collect();
        if subjects.contains(&own) {
            return Ok(());
        }
        let found = subjects.into_iter().next().unwrap_or_default();
        let found = found.split_once(CA_OF).map_or("another name", |(_, cluster)| cluster).to_owned();
        Err(CertsError::OtherCluster { file: file.to_owned(), found, cluster: self.cluster.clone() })
    }

    fn name(&self, process: &Process) -> Result<CertName, CertsError> {
        let Process { role, node } = process;
        let uri = format!("baton://{}/{}/{node}", self.cluster, role.as_str());
        CertName::parse(&uri).ok_or(CertsError::Name(uri))
    }

    /// Makes a certificate for `name`. Clients other than Baton's compare the host that they dial with `hosts`.
    pub(crate) fn issue(&self, name: &CertName, hosts: &[String], days: u32) -> Result<TlsPem, CertsError> {
        let local = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
        let mut params = CertificateParams::new([&local[..], hosts].concat())?;
        params.subject_alt_names.push(SanType::URI(name.to_string().try_into()?));
        params.distinguished_name = subject(&format!("baton {}", name.role.as_str()));
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        limit(&mut params, self.now, days);
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?;
        Ok(TlsPem { ca: self.issuer.pem().into(), cert: cert.pem().into(), key: key.serialize_pem().into() })
    }
}

/// Returns the subject in a certificate, whose last part is its common name. Empty: it cannot be read.
fn subject_of(certificate: &CertificateDer<'_>) -> String {
    let mut roots = RootCertStore::empty();
    let _ = roots.add(certificate.clone());
    roots.roots.pop().map(|root| String::from_utf8_lossy(&root.subject).into_owned()).unwrap_or_default()
}

fn subject(common_name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, common_name);
    subject
}

/// Valid from yesterday, for machines whose clocks are late.
fn limit(params: &mut CertificateParams, now: Duration, days: u32) {
    let today = date_time_ymd(1970, 1, 1) + now;
    params.not_before = today - DAY;
    params.not_after = today + DAY * days;
}

#[cfg(test)]
mod tests {
    use chassis::identity::{Identity, Tls, TlsFiles};
    use types::NodeId;

    use super::*;
    use crate::identity::check_rank_certificate;

    fn args(dir: &Path, processes: &[&str]) -> CertsArgs {
        let processes = processes.iter().map(|text| (*text).to_owned()).collect();
        CertsArgs {
            dir: dir.to_owned(),
            processes,
            cluster: "blue".to_owned(),
            hosts: vec!["router.example".to_owned()],
            days: 30,
        }
    }

    fn loaded(dir: &Path, name: &str) -> Tls {
        let file = |ending: &str| dir.join(format!("{name}.{ending}"));
        let files = TlsFiles { ca: dir.join("ca.pem"), cert: file("pem"), key: file("key") };
        let tls = Tls::load(files).expect("it loads");
        tls.check(World::real().unix_time()).expect("it is valid");
        tls
    }

    #[test]
    fn every_role_gets_a_certificate_and_a_second_run_changes_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("certs");
        assert_eq!(made(&args(&dir, &[])).expect("made").len(), 7);
        for role in ROLES {
            let tls = loaded(&dir, role.as_str());
            assert_eq!(tls.name().to_string(), format!("baton://blue/{}/*", role.as_str()));
            let left = tls.not_after().expect("it ends") - World::real().unix_time();
            assert!(left > DAY * 29 && left <= DAY * 30, "{left:?}");
        }
        let before = fs::read(dir.join("router.key")).expect("it is there");
        let error = made(&args(&dir, &[])).expect_err("they are there");
        assert!(
            error.to_string().ends_with("router.pem is there already: nothing is overwritten"),
            "{error}"
        );
        assert_eq!(fs::read(dir.join("router.key")).expect("it is there"), before);
        use std::os::unix::fs::PermissionsExt as _;
        let mode = fs::metadata(dir.join("router.key")).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn the_ca_of_a_folder_signs_later_certificates_too() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path();
        made(&args(dir, &["prefill/a"])).expect("made");
        made(&args(dir, &["both", "decode/b"])).expect("made");
        assert_eq!(loaded(dir, "prefill-a").name().to_string(), "baton://blue/prefill/a");
        assert_eq!(loaded(dir, "decode-b").name().to_string(), "baton://blue/decode/b");
        assert_eq!(loaded(dir, "both").name().to_string(), "baton://blue/both/*");
    }

    #[test]
    fn the_ca_of_another_cluster_signs_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path();
        made(&args(dir, &["router"])).expect("made");
        let other = CertsArgs { cluster: "green".to_owned(), ..args(dir, &["prefill"]) };
        let error = made(&other).expect_err("peers of blue would refuse it").to_string();
        assert!(
            error.contains("\"blue\", not of the cluster \"green\"") && error.contains("ca.pem"),
            "{error}"
        );
        assert!(!dir.join("prefill.pem").exists());
        let own = fs::read_to_string(dir.join("ca.pem")).expect("it is there");
        let second = Authority::new("green", World::real().unix_time()).expect("a CA");
        fs::write(dir.join("ca.pem"), second.issuer.pem() + &own).expect("written");
        made(&args(dir, &["prefill"])).expect("the CA is one of two");
    }

    #[test]
    fn a_further_process_uses_the_certificate_of_its_node() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path();
        made(&args(dir, &["prefill", "decode/n", "both", "pool", "router"])).expect("made");
        let (own, other) = (NodeId::new("n"), NodeId::new("other"));
        for (name, id, is_accepted) in [
            ("prefill", None, true),
            ("prefill", Some(&own), true),
            ("decode-n", None, true),
            ("decode-n", Some(&own), true),
            ("decode-n", Some(&other), false),
            ("both", Some(&own), true),
            ("pool", None, false),
            ("router", None, false),
        ] {
            let identity = Identity::default().with_tls(loaded(dir, name));
            assert_eq!(check_rank_certificate(&identity, id).is_ok(), is_accepted, "{name} for {id:?}");
        }
    }

    #[test]
    fn wrong_names_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        for wrong in ["king", "prefill/", "prefill/a/b", "prefill/a b"] {
            assert!(matches!(made(&args(folder.path(), &[wrong])), Err(CertsError::Process(_))), "{wrong}");
        }
        let wrong = CertsArgs { cluster: "a/b".to_owned(), ..args(folder.path(), &[]) };
        assert!(matches!(made(&wrong), Err(CertsError::Name(_))));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }
}
