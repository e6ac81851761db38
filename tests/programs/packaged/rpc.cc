// gRPC without generated code: unary calls and streams of noise, every answer compared.
//   rpc serve|load PORT DIR      as ../packaged.sh
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <iostream>
#include <random>
#include <thread>

using grpc::ByteBuffer;

// Sends back each message of a call.
struct Echo : grpc::ServerGenericBidiReactor {
  ByteBuffer message;
  Echo() { StartRead(&message); }
  void OnReadDone(bool ok) override {
    if (ok) StartWrite(&message);
    else Finish(grpc::Status::OK);
  }
  void OnWriteDone(bool) override {
    message.Clear();
    StartRead(&message);
  }
  void OnDone() override { delete this; }
};

struct Service : grpc::CallbackGenericService {
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override { return new Echo; }
};

static ByteBuffer packed(const std::string& s) {
  grpc::Slice slice(s);
  return ByteBuffer(&slice, 1);
}

static std::string unpacked(const ByteBuffer& b) {
  std::vector<grpc::Slice> parts;
  b.Dump(&parts);
  std::string s;
  for (auto& p : parts) s.append(reinterpret_cast<const char*>(p.begin()), p.size());
  return s;
}

static void check(bool right) {
  if (right) return;
  std::cerr << "BYTES DIFFER" << std::endl;
  _exit(1);
}

// One call with these messages, one after the other.
struct Call : grpc::ClientBidiReactor<ByteBuffer, ByteBuffer> {
  const std::vector<std::string>& messages;
  size_t at = 0;
  std::atomic<int> under_way{0};
  ByteBuffer out, in;
  grpc::ClientContext context;
  std::promise<bool> done;
  Call(grpc::GenericStub& stub, const std::vector<std::string>& m) : messages(m) {
    stub.PrepareBidiStreamingCall(&context, "/s/echo", {}, this);
    next();
    StartCall();
  }
  void next() {
    under_way = 2;
    out = packed(messages[at]);
    StartWrite(&out);
    StartRead(&in);
  }
  void part(bool ok) {  // written, or read
    if (!ok || --under_way) return;
    check(unpacked(in) == messages[at]);
    if (++at < messages.size()) next();
    else StartWritesDone();
  }
  void OnReadDone(bool ok) override { part(ok); }
  void OnWriteDone(bool ok) override { part(ok); }
  void OnDone(const grpc::Status& s) override { done.set_value(s.ok() && at == messages.size()); }
};

static void load(const std::string& where, const std::string& dir) {
  grpc::ChannelArguments big;
  big.SetMaxReceiveMessageSize(-1);
  auto channel = grpc::CreateCustomChannel(where, grpc::InsecureChannelCredentials(), big);
  check(channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(30)));
  grpc::GenericStub stub(channel);
  std::mt19937_64 random(7);
  auto begin = std::chrono::steady_clock::now();
  std::ofstream(dir + "/begun").put('\n');
  double moved = 0;
  const size_t sizes[] = {0, 100, 10000, 300000, 4000000};
  for (int n = 0; !std::ifstream(dir + "/stop"); n++) {
    std::vector<std::string> messages(n % 2 ? 1 : 10);
    for (auto& m : messages) {
      m.resize(sizes[n % 5]);
      for (auto& c : m) c = char(random());
      moved += 2.0 * m.size();
    }
    Call call(stub, messages);
    check(call.done.get_future().get());
  }
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::cout << "rate " << moved / 1e6 / took.count() << " MB/s\nok" << std::endl;
}

int main(int, char** args) {
  std::string where = "127.0.0.1:" + std::string(args[2]);
  if (args[1] == std::string("load")) {
    load(where, args[3]);
    return 0;
  }
  Service service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(where, grpc::InsecureServerCredentials());
  builder.RegisterCallbackGenericService(&service);
  builder.SetMaxReceiveMessageSize(-1);
  builder.BuildAndStart()->Wait();
}
